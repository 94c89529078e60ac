"""What is growing worth on a text? Plays every blueprint in every slot from step 0.

    python benchmarks/text.py --write

Also plays never growing and growing everything at once, on ``--groups`` hosts of each text task.
All plans are played on the same hosts. Results are kept under ``--work``. A loss is shown in bits
per byte: nats over ln 2.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from reporting import kept, made_on, new_parser, publish, table
from runs import Mean

from esper.leyline.actions import BLUEPRINTS, Style
from esper.runtime.tasks import Task, find
from esper.runtime.text import BITS_PER_NAT
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.simic.tools.diagnosis import PolicyResult, run_policy
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.precision import Precision

HOSTS = 1
"""Episode number that determines the hosts."""


def plans(task: Task) -> dict[str, Schedule]:
    """Return the plans by name: never, everything, and each blueprint in each slot from step 0."""
    slots = task.host.slots
    found = {"never": Schedule.never(1, len(slots)), "everything": Schedule.everything(1, slots)}
    for s, slot in enumerate(slots):
        for kind in slot.kinds:
            single = Schedule.never(1, len(slots))
            single.start[0, s], single.blueprint[0, s], single.tempo[0, s] = 0, kind, 0
            single.style[0, s] = int(Style.LINEAR_ADD)
            found[f"{BLUEPRINTS[kind]} in {slot.name}"] = single
    return found


def played(task: Task, plan: Schedule, groups: int, at_once: bool) -> PolicyResult:
    """Play a plan on the same hosts as every other plan, one environment per host."""
    config = GrowthConfig(
        seed=1,
        group_size=1,
        episode_length=task.episode_length,
        max_batches=task.max_batches,
        batch_size=task.batch_size,
        one_at_a_time=not at_once,
    )
    env = GrowthEnv([task], torch.arange(groups), config, Precision("cpu"), torch.device("cpu"))
    actor = ScheduleActor(plan.take(torch.zeros(groups, dtype=torch.long)))
    return run_policy(env, actor, HOSTS)


def schedules(task: Task, groups: int) -> dict[str, Any]:
    """Return utility, accuracy and bits per byte of each plan, by host."""
    found = {}
    for name, plan in plans(task).items():
        result = played(task, plan, groups, name == "everything")
        found[name] = {
            "schedule": name,
            "utility": (100 * result.validation.utility).tolist(),
            "accuracy": (100 * result.validation.accuracy).tolist(),
            "bits": (BITS_PER_NAT * result.validation.loss).tolist(),
        }
    return found


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
