"""What is growing worth on a text? Fixed schedules, and a short run of PPO.

    python benchmarks/text.py --write

1. Every blueprint in every slot from step 0, and everything at once, on ``--groups`` hosts of each
   task on text. All plans are played on the same hosts, by ``tasks.play``.
2. PPO on ``text_bytes`` for ``--rounds`` rounds, against the twins that never grow.

What is finished is kept under ``--work``. A loss is shown in bits per byte: nats over ln 2.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from machine import made_on
from runs import ZERO, mean_gain, trained
from tasks import play, single_plans

from esper.karn.store import read_events
from esper.leyline.config import TrainConfig, flatten
from esper.leyline.events import EpisodeOutcome
from esper.runtime.tasks import Task, find
from esper.runtime.text import BITS_A_NAT

RESULTS = Path(__file__).parent / "results"
TASKS = ("text_bytes", "text_gpt")
HOSTS = 1
"""Episode number that names the hosts."""


def schedules(task: Task, groups: int) -> dict:
    """Utility, accuracy and bits per byte of each plan, by host."""
    plans = single_plans(task)
    utility, accuracy, loss = play(task, plans, groups, HOSTS, 1)
    return {
        plan.name: {
            "schedule": plan.name.removeprefix("single "),
            "utility": (100 * utility[:, i]).tolist(),
            "accuracy": (100 * accuracy[:, i]).tolist(),
            "bits": (BITS_A_NAT * loss[:, i]).tolist(),
        }
        for i, plan in enumerate(plans)
    }


def table(rows: dict) -> list[str]:
    """One line a plan, the best first, with the gain over never growing on the same hosts."""
    never = np.array(rows["never"]["utility"])
    lines = [
        "| from step 0 | utility | gain | accuracy, % | bits per byte |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows.values(), key=lambda row: -np.mean(row["utility"])):
        gain = np.array(row["utility"]) - never
        lines.append(
            f"| {row['schedule']} | {_mean(row['utility'])} | {_mean(gain, '+')} "
            f"| {_mean(row['accuracy'])} | {_mean(row['bits'], digits=3)} |"
        )
    return lines


def _mean(values: list[float] | np.ndarray, sign: str = "", digits: int = 1) -> str:
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):{sign}.{digits}f} ± {error:.{digits}f}"


def learned(settings: dict, work: Path) -> tuple[list[str], bool]:
    """Lines on the run, and whether it gained by two standard errors."""
    run = trained("ppo", settings, work / "ppo")
    outcomes = list(read_events(run, EpisodeOutcome))
    half = len(outcomes) // 2
    lines = ["| rounds | gain in utility | gain in accuracy | fossilised an episode |"]
    lines.append("|---|---|---|---|")
    parts = {f"1 to {half}": outcomes[:half], f"{half + 1} to {len(outcomes)}": outcomes[half:]}
    for name, part in {**parts, "all": outcomes}.items():
        utility, accuracy = (
            mean_gain(part, settings["group_size"], measure) for measure in ("utility", "accuracy")
        )
        kept = np.mean([outcome.fossilised for outcome in part])
        lines.append(f"| {name} | {utility} | {accuracy} | {kept:.2f} |")
    return lines, mean_gain(outcomes, settings["group_size"]).above(ZERO)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path("runs/text"))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    text = ["# Growing on a text", "", f"`python benchmarks/text.py --groups {arguments.groups}"]
    text[-1] += f" --rounds {arguments.rounds} --envs {arguments.envs} --write`"
    text += [
        "",
        "The text that comes with Esper. Mean over hosts ± one standard error; utility and",
    ]
    text += ["accuracy in points of a hundred, at the end of an episode, committed seeds alone."]
    for name in arguments.tasks:
        task, path = find(name), arguments.work / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(schedules(task, arguments.groups)))
        rows = json.loads(path.read_text())
        hosts = len(rows["never"]["utility"])
        size = f"{task.host.parameter_count} parameters, {hosts} hosts"
        text += ["", f"## {name}: {task.host.summary}, {size}", "", *table(rows)]
    gained = True
    if arguments.rounds:
        settings = {
            **flatten(TrainConfig()),
            "task": "text_bytes",
            "rounds": arguments.rounds,
            "envs": arguments.envs,
            "group_size": arguments.group_size,
            "backend": "torch",
            "threads": 1,
        }
        lines, gained = learned(settings, arguments.work)
        text += ["", f"## PPO on text_bytes, {arguments.envs} environments", "", *lines, ""]
        text += [
            "Gains over the never-grow twin, as a learner begins: by the end of so short a run"
        ]
        text += ["it has learned little."]
    text += ["", f"{made_on('1 thread')}."]
    print("\n".join(text))
    if arguments.write:
        (RESULTS / "text.md").write_text("\n".join(text) + "\n")
    return 0 if gained else 1


if __name__ == "__main__":
    raise SystemExit(main())
