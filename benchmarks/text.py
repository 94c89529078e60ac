"""What is growing worth on a text? Plays every blueprint in every slot from step 0.

    python benchmarks/text.py --write

Also plays never growing and growing everything at once, on ``--groups`` hosts of each text task.
All plans are played on the same hosts, whose never-grow twins see the same minibatches. Results are
kept under ``--work``. A loss is shown in bits per byte: nats over ln 2.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import kept, made_on, new_parser, publish, table

from esper.karn.intervals import interval
from esper.leyline.actions import BLUEPRINTS, Style
from esper.runtime.tasks import Task, find
from esper.runtime.text import BITS_PER_NAT
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.precision import Precision
from esper_lab.describe import PolicyResult, run_policy
from esper_lab.ladder_steps import points_text

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
    """Return what each plan scores on either split, by host: points, and bits per byte."""
    found = {}
    for name, plan in plans(task).items():
        result = played(task, plan, groups, name == "everything")
        found[name] = {
            split: {
                "utility": (100 * ending.utility).tolist(),
                "gain": (100 * ending.gain).tolist(),
                "accuracy": (100 * ending.accuracy).tolist(),
                "bits": (BITS_PER_NAT * ending.loss).tolist(),
            }
            for split, ending in (("test", result.test), ("validation", result.validation))
        }
    return found


def page(found: dict[str, Any]) -> str:
    """Return one line per plan, best first; gains are above the never-grow twin of each host."""
    ordered = sorted(found.items(), key=lambda item: -float(np.mean(item[1]["test"]["utility"])))
    rows = [
        (
            name,
            shown(own["test"]["utility"], ".1f"),
            shown(own["test"]["gain"], "+.1f"),
            f"{np.mean(own['validation']['gain']):+.1f}",
            shown(own["test"]["accuracy"], ".1f"),
            shown(own["test"]["bits"], ".3f"),
        )
        for name, own in ordered
    ]
    heads = ("utility", "gain", "gain on validation", "accuracy, %", "bits per byte")
    return table(("from step 0", *heads), rows)


def shown(values: list[float], form: str) -> str:
    """Return the mean over hosts with its 95 % interval."""
    known = interval(np.array([values]))
    return points_text((known.mean[0], known.low[0], known.high[0]), form)


def recipe(task: Task) -> str:
    """Say that the host's recipe was not tuned."""
    return (
        f"The recipe of the host is untuned: a learning rate of {task.learning_rate:g}, "
        f"{task.decay}, for host and seeds. A gain may be what a better rate would give as well."
    )


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=["text_bytes", "text_gpt"])
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/text"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = [
        "The text that comes with Esper. Means over hosts with 95 % intervals (Student's t), on "
        "the test split after the last step, with only the fossilised seeds; the gain on "
        "validation stands beside. Utility, gain and accuracy in points."
    ]
    for name in arguments.tasks:
        task = find(name)
        make = partial(schedules, task, arguments.groups)
        found = kept(arguments.work / f"{name}-{arguments.groups}-hosts.json", make)
        size = f"{task.host.parameter_count} parameters, {arguments.groups} hosts"
        parts += [f"## {name}: {task.host.summary}, {size}", recipe(task), page(found)]
    title = "What growing is worth on text"
    publish("text", title, [*parts, f"{made_on('1 thread')}."], arguments.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
