"""What is growing worth on a text? Plays every blueprint in every slot from step 0.

    python benchmarks/text.py --write

Also plays never growing and growing everything at once, on ``--groups`` hosts of each text task.
All plans are played on the same hosts, by ``tasks.run_plans``. Results are kept under ``--work``. A
loss is shown in bits per byte: nats over ln 2. ``learning.py --task text_bytes`` trains PPO on a
text.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from reporting import kept, made_on, new_parser, publish, table
from runs import Mean
from tasks import run_plans, single_plans

from esper.runtime.tasks import Task, find
from esper.runtime.text import BITS_PER_NAT

HOSTS = 1
"""Episode number that determines the hosts."""


def schedules(task: Task, groups: int) -> dict[str, Any]:
    """Return utility, accuracy and bits per byte of each plan, by host."""
    plans = single_plans(task)
    utility, accuracy, loss = run_plans(task, plans, groups, HOSTS, 1)
    return {
        plan.name: {
            "schedule": plan.name.removeprefix("single "),
            "utility": (100 * utility[:, i]).tolist(),
            "accuracy": (100 * accuracy[:, i]).tolist(),
            "bits": (BITS_PER_NAT * loss[:, i]).tolist(),
        }
        for i, plan in enumerate(plans)
    }


def page(found: dict[str, Any]) -> str:
    """Return one line per plan, best first, with the gain over never growing on the same hosts."""
    never = np.array(found["never"]["utility"])
    rows = []
    for row in sorted(found.values(), key=lambda row: -float(np.mean(row["utility"]))):
        gain = _mean(np.array(row["utility"]) - never, "+")
        others = (_mean(row["accuracy"]), _mean(row["bits"], digits=3))
        rows.append((row["schedule"], _mean(row["utility"]), gain, *others))
    return table(("from step 0", "utility", "gain", "accuracy, %", "bits per byte"), rows)


def _mean(values: ArrayLike, sign: str = "", digits: int = 1) -> str:
    mean = Mean.of(values)
    return f"{mean.value:{sign}.{digits}f} ± {mean.error:.{digits}f}"


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=["text_bytes", "text_gpt"])
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/text"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = [
        "The text that comes with Esper. Mean over hosts ± one standard error; utility and "
        "accuracy on validation in points, at the end of an episode, with only the fossilised "
        "seeds.",
    ]
    for name in arguments.tasks:
        task = find(name)
        make = partial(schedules, task, arguments.groups)
        found = kept(arguments.work / f"{name}.json", make)
        size = f"{task.host.parameter_count} parameters, {len(found['never']['utility'])} hosts"
        parts += [f"## {name}: {task.host.summary}, {size}", page(found)]
    title = "What growing is worth on text"
    publish("text", title, [*parts, f"{made_on('1 thread')}."], arguments.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
