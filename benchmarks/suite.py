"""Does a policy learn to adapt to the task? Trains on the suite, by reward, against controls.

    python benchmarks/suite.py --write                    # all rewards of utility, five seeds
    python benchmarks/suite.py --rewards paired --seeds 1

For every reward and seed: PPO on the training suite. For every seed: the random policy, the plateau
heuristic and never-grow. The measure is the gain (test utility above the never-grow twin's) over
the last quarter of the rounds, with equal weight per task; see ``runs.Run.gain``. Runs are kept
under ``--work``: an interrupted run is resumed from its last checkpoint, and a finished one is not
repeated.
"""

from pathlib import Path
from typing import Any

import numpy as np
from reporting import made_on, publish, table
from runs import ZERO, Mean, Settings, controls, of_task, study_parser, trained

from esper.runtime.tasks import SUITES

TRACE_DECAY = {"terminal": 1.0}
"""Lambda where it is not the default: a reward on the last step alone needs no decay."""
CONTROL_ROUNDS = 3


def measured(reward: str, settings: Settings, work: Path) -> dict[str, Any]:
    """Return the results of one PPO run."""
    own: Settings = {"reward": reward}
    if reward in TRACE_DECAY:
        own["trace_decay"] = TRACE_DECAY[reward]
    run = trained("ppo", {**settings, **own}, work / f"{reward}-seed{settings['seed']}")
    begin, end = run.ends(4)

    def by_task(field: str) -> dict[str, float]:
        return {task: of_task(end, task, field) for task in SUITES["suite"]}

    worth, twin = by_task("test_utility"), by_task("twin_test_utility")
    return {
        "reward": reward,
        "seed": settings["seed"],
        "first": run.gain(begin),
        "last": run.gain(end),
        "validation": run.gain(end, "utility"),
        "accuracy": run.gain(end, "test_accuracy"),
        "seeds": by_task("germinated"),
        "kept": by_task("fossilised"),
        "gains": {task: worth[task] - twin[task] for task in worth},
        "within": float(run.metric("explained_variance_within_step")[-len(end) :].mean()),
        "seconds": run.seconds,
    }


def holds(row: dict[str, Any], control: dict[str, Mean]) -> bool:
    """Whether a run beats never and random, and germinates less where growing gains less."""
    adapts = row["seeds"]["digits"] <= 0.5 * row["seeds"]["digits_shift"]
    return row["last"].above(ZERO) and row["last"].above(control["random"]) and adapts


def compared(rows: list[dict[str, Any]], rewards: list[str]) -> str:
    """Compare the rewards, with means over seeds."""
    heads = (
        *("reward", "gain (test), points", f"difference from {rewards[0]}, same seeds"),
        *("gain on validation", "test accuracy above the twin's"),
        *("seeds on digits", "on digits_shift"),
        *("explained variance within a step", "seeds"),
    )
    first = {row["seed"]: row["last"].value for row in rows if row["reward"] == rewards[0]}
    lines = []
    for reward in rewards:
        own = [row for row in rows if row["reward"] == reward]
        names = ("last", "validation", "accuracy")
        last, validation, accuracy = ([row[k].value for row in own] for k in names)
        less = [row["last"].value - first[row["seed"]] for row in own]
        seeds = [np.mean([row["seeds"][t] for row in own]) for t in ("digits", "digits_shift")]
        within = np.mean([row["within"] for row in own])
        lines.append(
            (
                reward,
                *(f"{Mean.of(values):.2f}" for values in (last, less, validation, accuracy)),
                *(f"{value:.2f}" for value in (*seeds, within)),
                " ".join(str(row["seed"]) for row in own),
            )
        )
    return table(heads, lines)


def by_seed(rows: list[dict[str, Any]], control: dict[int, dict[str, Mean]]) -> str:
    """Return a table with one line per run."""
    heads = (
        *("reward", "seed", "first quarter", "last quarter", "random", "heuristic"),
        *("seeds on digits", "on digits_shift", "minutes", "holds"),
    )
    lines = []
    for row in rows:
        own, seeds = control[row["seed"]], row["seeds"]
        lines.append(
            (
                *(row["reward"], row["seed"], row["first"], row["last"]),
                *(own["random"], own["heuristic"]),
                *(f"{seeds['digits']:.2f}", f"{seeds['digits_shift']:.2f}"),
                *(f"{row['seconds'] / 60:.1f}", "yes" if holds(row, own) else "NO"),
            )
        )
    return table(heads, lines)


def by_task(rows: list[dict[str, Any]]) -> str:
    """Return a table of the gain on each task, one line per run."""
    tasks = SUITES["suite"]
    lines = []
    for row in rows:
        gains, seeds, kept = row["gains"], row["seeds"], row["kept"]
        cells = (f"{100 * gains[t]:+.1f} ({seeds[t]:.1f}, {kept[t]:.1f})" for t in tasks)
        lines.append((row["reward"], row["seed"], *cells))
    return table(("reward", "seed", *tasks), lines)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = study_parser(__doc__, "suite", seeds=5, rounds=32)
    parser.add_argument("--rewards", nargs="+", default=["paired", "terminal", "utility"])
    parser.add_argument("--envs", type=int, default=28)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    envs, group_size, rounds = arguments.envs, arguments.group_size, arguments.rounds
    settings = {"task": ["suite"], "envs": envs, "group_size": group_size}
    settings |= {"rounds": rounds, "threads": arguments.threads}
    control = {}
    for seed in arguments.seeds:
        few = {**settings, "seed": seed, "rounds": min(CONTROL_ROUNDS, rounds)}
        played = controls(few, arguments.work)
        control[seed] = {name: run.gain(run.outcomes) for name, run in played.items()}
    rows: list[dict[str, Any]] = []
    for reward in arguments.rewards:
        for seed in arguments.seeds:
            rows.append(measured(reward, {**settings, "seed": seed}, arguments.work))
            print(by_seed(rows, control), flush=True)
    parts = (
        f"{envs} environments in groups of {group_size}, {rounds} rounds of one episode per "
        f"environment, {envs * rounds} episodes of seven tasks. Lambda is 1 for `terminal`, else "
        "the default. The gain is test utility above the never-grow twin's in points, last "
        "quarter of the rounds, with equal weight per task; ± one standard error over seeds.",
        compared(rows, arguments.rewards),
        "By run, ± one standard error over hosts; seeds are those germinated per episode. A run "
        "holds if its last quarter is above never and above random by two standard errors of the "
        "difference, and it germinates on `digits` at most half as many seeds as on "
        "`digits_shift`.",
        by_seed(rows, control),
        by_task(rows),
        "The last table: gain on each task, on test (seeds germinated, fossilised per episode).",
        f"{made_on()}. Minutes are those of rollouts and updates.",
    )
    publish("suite", "Learning on the suite, by reward", parts, arguments.write, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
