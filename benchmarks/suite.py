"""Does a policy learn to look? Training on the suite, by reward, against its controls.

    python benchmarks/suite.py --write                    # every reward of utility, five seeds
    python benchmarks/suite.py --rewards paired --seeds 1

For every reward and seed: PPO on the training suite. For every seed: the random policy, the plateau
heuristic and never-grow. What counts is utility above the never-grow twin's, tasks weighing the
same, over the last quarter of the rounds; see ``runs.mean_gain``. Runs lie under ``--work``; a run
that was cut off goes on from its last checkpoint, and one that is finished is not run again.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from machine import made_on
from runs import ZERO, Mean, mean_gain, of_task, trained

from esper.karn.store import read_events
from esper.leyline.config import TrainConfig, flatten
from esper.leyline.events import AnalyticsSnapshot, EpisodeOutcome, PPOUpdateCompleted
from esper.leyline.metrics import Metric
from esper.runtime.tasks import SUITES
from esper.simic.run.run_directory import stored_config

RESULTS = Path(__file__).parent / "results"
TRACE_DECAY = {"terminal": 1.0}
"""Lambda where it is not the default: a reward on the last step alone has nothing to trace."""
CONTROL_ROUNDS = 3


def learned(reward: str, seed: int, settings: dict, work: Path) -> dict:
    """What came of one PPO run."""
    own = {"reward": reward, "seed": seed}
    if reward in TRACE_DECAY:
        own["trace_decay"] = TRACE_DECAY[reward]
    run = trained("ppo", {**settings, **own}, work / f"{reward}-seed{seed}")
    outcomes = list(read_events(run, EpisodeOutcome))
    updates = list(read_events(run, PPOUpdateCompleted))
    speed = list(read_events(run, AnalyticsSnapshot))
    quarter = math.ceil(len(outcomes) / 4)
    ends, size = outcomes[-quarter:], settings["group_size"]
    within = [u.metrics[Metric.EXPLAINED_VARIANCE_WITHIN_STEP] for u in updates[-quarter:]]
    return {
        "reward": reward,
        "seed": seed,
        "first": mean_gain(outcomes[:quarter], size, "utility"),
        "last": mean_gain(ends, size, "utility"),
        "accuracy": mean_gain(ends, size),
        "seeds": {task: of_task(ends, task, "germinated") for task in SUITES["suite"]},
        "kept": {task: of_task(ends, task, "fossilised") for task in SUITES["suite"]},
        "gains": {
            task: of_task(ends, task, "utility") - of_task(ends, task, "twin_utility")
            for task in SUITES["suite"]
        },
        "within": float(np.mean(within)),
        "seconds": sum(s.rollout_seconds + s.update_seconds for s in speed),
        "threads": stored_config(run)[1]["threads"],
    }


def controls(seed: int, settings: dict, work: Path) -> dict[str, Mean]:
    """Utility of the policies that do not learn, above the twin's."""
    found = {}
    for policy in ("random", "heuristic", "never"):
        own = {"seed": seed, "rounds": min(CONTROL_ROUNDS, settings["rounds"])}
        run = trained(policy, {**settings, **own}, work / f"{policy}-seed{seed}")
        played = list(read_events(run, EpisodeOutcome))
        found[policy] = mean_gain(played, settings["group_size"], "utility")
    return found


def holds(row: dict, control: dict[str, Mean]) -> bool:
    """Whether a run shows what it should: above never and random, and it looks."""
    looks = row["seeds"]["digits"] <= 0.5 * row["seeds"]["digits_shift"]
    return row["last"].above(ZERO) and row["last"].above(control["random"]) and looks


def compared(rows: list[dict], rewards: list[str]) -> str:
    """Rewards against each other, means over seeds."""
    lines = [
        f"| reward | utility above never, points | less that of {rewards[0]}, same seeds "
        "| accuracy | seeds on digits | on digits_shift "
        "| explained variance within a step | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for reward in rewards:
        own = [row for row in rows if row["reward"] == reward]
        if not own:
            continue
        last, accuracy = (np.array([row[k].value for row in own]) for k in ("last", "accuracy"))
        first = {row["seed"]: row["last"].value for row in rows if row["reward"] == rewards[0]}
        shared = [row["last"].value - first[row["seed"]] for row in own if row["seed"] in first]
        seeds = [np.mean([row["seeds"][t] for row in own]) for t in ("digits", "digits_shift")]
        lines.append(
            f"| {reward} | {_over(last)} | {_over(np.array(shared))} | {_over(accuracy)} "
            f"| {seeds[0]:.2f} | {seeds[1]:.2f} "
            f"| {np.mean([row['within'] for row in own]):.2f} "
            f"| {' '.join(str(row['seed']) for row in own)} |"
        )
    return "\n".join(lines)


def _over(values: np.ndarray) -> str:
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{100 * values.mean():+.2f} ± {100 * error:.2f}"


def by_seed(rows: list[dict], control: dict[int, dict[str, Mean]]) -> str:
    """One line for every run."""
    tasks = SUITES["suite"]
    lines = [
        "| reward | seed | first quarter | last quarter | random | heuristic | seeds on digits "
        "| on digits_shift | minutes | holds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = control[row["seed"]]
        lines.append(
            f"| {row['reward']} | {row['seed']} | {row['first']} | {row['last']} "
            f"| {own['random']} | {own['heuristic']} | {row['seeds']['digits']:.2f} "
            f"| {row['seeds']['digits_shift']:.2f} | {row['seconds'] / 60:.1f} "
            f"| {'yes' if holds(row, own) else 'NO'} |"
        )
    lines += [
        "",
        "| reward | seed | " + " | ".join(tasks) + " |",
        "|---|---|" + "---|" * len(tasks),
    ]
    for row in rows:
        cells = [
            f"{100 * row['gains'][t]:+.1f} ({row['seeds'][t]:.1f}, {row['kept'][t]:.1f})"
            for t in tasks
        ]
        lines.append(f"| {row['reward']} | {row['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rewards", nargs="+", default=["paired", "terminal", "utility"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--envs", type=int, default=28)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--work", type=Path, default=Path("runs/suite"))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    settings = {
        **flatten(TrainConfig()),
        "task": ["suite"],
        "envs": arguments.envs,
        "group_size": arguments.group_size,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
    }
    control = {seed: controls(seed, settings, arguments.work) for seed in arguments.seeds}
    rows: list[dict] = []
    for reward in arguments.rewards:
        for seed in arguments.seeds:
            rows.append(learned(reward, seed, settings, arguments.work))
            print(by_seed(rows, control), flush=True)
    threads = rows[0]["threads"]
    text = (
        "# Learning on the suite, by reward\n\n"
        f"`OMP_NUM_THREADS={threads} python benchmarks/suite.py "
        f"--rewards {' '.join(arguments.rewards)} --seeds {' '.join(map(str, arguments.seeds))} "
        f"--rounds {arguments.rounds} --envs {arguments.envs} "
        f"--group-size {arguments.group_size} --write`\n\n"
        f"{arguments.envs} environments in groups of {arguments.group_size}, "
        f"{arguments.rounds} rounds: an episode of each, so "
        f"{arguments.envs * arguments.rounds} episodes of seven tasks. Lambda is 1 for `terminal`, "
        "else as it comes. Utility above the never-grow twin's in points, last quarter of the "
        "rounds, all tasks weighing the same; ± one standard error over seeds.\n\n"
        f"{compared(rows, arguments.rewards)}\n\n"
        "By run, ± one standard error over hosts; seeds are those germinated in an episode. A run "
        "holds when its last quarter is above never and above random by two standard errors of the "
        "difference, and it germinates on `digits` at most half of what it does on "
        "`digits_shift`.\n\n"
        f"{by_seed(rows, control)}\n\n"
        "The second table: utility gained on each task (seeds germinated, fossilised).\n\n"
        f"{made_on(f'{threads} thread a run')}. Minutes are those of rollouts and "
        "updates.\n"
    )
    print(text)
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "suite.md").write_text(text)
        plain = [{k: vars(v) if isinstance(v, Mean) else v for k, v in row.items()} for row in rows]
        (RESULTS / "suite.json").write_text(json.dumps(plain, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
