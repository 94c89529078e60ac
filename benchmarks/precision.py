"""Does mixed precision cost accuracy? Compares trainings in float32 and in half precision.

    python benchmarks/precision.py --write
    python benchmarks/precision.py --tasks digits_mlp --seeds 1 2 --rounds 4

For every task and seed: PPO with ``--backend torch`` with hosts in float32, in bfloat16 and in
float16, and in bfloat16 with the policy's trunk too; all other settings are equal. Final accuracy
is the committed validation accuracy of the grown hosts, averaged over the last quarter of the
rounds. Since growing is learned, it falls both when hosts learn worse and when the policy does.
Runs are kept under ``--work``: an interrupted run is resumed from its last checkpoint, and a
finished one is not repeated.
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from reporting import made_on, publish, table
from runs import Run, Settings, study_parser, trained

from esper.karn.intervals import interval
from esper.leyline.events import EpisodeOutcome, to_floats

MIN_RATIO = 0.9
"""Smallest ratio of final accuracy in mixed precision to that in float32, median over the seeds."""
TASKS = ("digits_shift", "digits_mlp", "digits")
"""CNNs of 4-8 and 8-16 channels, and an MLP."""
PLAIN = "float32"
ARMS: dict[str, Settings] = {
    PLAIN: {"use_amp": False},
    "bfloat16": {"use_amp": True, "amp_dtype": "bfloat16"},
    "float16": {"use_amp": True, "amp_dtype": "float16"},
    "bfloat16, policy too": {"use_amp": True, "amp_dtype": "bfloat16", "amp_policy": True},
}


def measured(run: Run) -> dict[str, Any]:
    """Return seconds, and accuracies and gains over the twin in the first and last quarter."""

    def accuracy(part: list[EpisodeOutcome], field: str) -> float:
        return statistics.fmean(v for o in part for v in to_floats(getattr(o, field)))

    first, last = run.ends(4)
    return {
        "dtypes": sorted({s.amp_dtype or PLAIN for s in run.snapshots}),
        "first": accuracy(first, "accuracy"),
        "final": accuracy(last, "accuracy"),
        "twin": accuracy(last, "twin_accuracy"),
        "gain": str(run.gain(last)),
        "rolled_back": sum(sum(o.rolled_back) for o in run.outcomes),
        "seconds": run.seconds,
    }


def measured_arm(settings: Settings, arm: str, work: Path) -> dict[str, Any]:
    """Return the results of one training; ``settings`` name task and seed."""
    name = f"{settings['task']}-{arm.replace(', ', '-').replace(' ', '-')}-seed{settings['seed']}"
    run = trained("ppo", {**settings, **ARMS[arm]}, work / name)
    row = measured(run)
    wanted = [ARMS[arm].get("amp_dtype", PLAIN)]
    if row["dtypes"] != wanted:
        raise SystemExit(f"{run.path} computed in {row['dtypes']}, not in {wanted}")
    return row


def compared(settings: Settings, amp_dtype: str, work: Path) -> dict[str, Any]:
    """Return the results of a seed in float32 and in a half precision, and their ratio."""
    # The training in float32 is the same beside either dtype.
    row = {arm: measured_arm(settings, arm, work) for arm in (PLAIN, amp_dtype)}
    return row | {"ratio": row[amp_dtype]["final"] / row[PLAIN]["final"]}


def page(rows: list[dict[str, Any]]) -> str:
    """Return a line per task and arm in Markdown: means over seeds, and the ratio."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        for arm in ARMS:
            final = statistics.fmean(row[arm]["final"] for row in own)
            twin = statistics.fmean(row[arm]["twin"] for row in own)
            back = sum(row[arm]["rolled_back"] for row in own)
            lines.append(
                [task, arm, f"{100 * final:.1f} %", f"{100 * twin:.1f} %", back, *ratio(own, arm)]
            )
    return table(
        ["task", "hosts", "final accuracy", "twin", "rollbacks", "ratio", "median", "seeds"], lines
    )


def ratio(rows: list[dict[str, Any]], arm: str) -> tuple[str, str, int]:
    """Return mean ratio to float32 with its interval over seeds, the median, and the seeds."""
    if arm == PLAIN:
        return "", "", len(rows)
    ratios = ratios_of(rows, arm)
    found = interval(np.array([ratios]))
    mean, low, high = (float(part[0]) for part in (found.mean, found.low, found.high))
    return (f"{mean:.3f} [{low:.3f}, {high:.3f}]", f"{statistics.median(ratios):.3f}", len(rows))


def ratios_of(rows: list[dict[str, Any]], arm: str) -> list[float]:
    """Return the ratios of final accuracy to that in float32, by seed."""
    return [row[arm]["final"] / row[PLAIN]["final"] for row in rows]


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = study_parser(__doc__, "precision", seeds=3, rounds=8)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    arguments = parser.parse_args()
    settings = {"rounds": arguments.rounds, "envs": arguments.envs, "backend": "torch"}
    rows = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            own = {**settings, "task": task, "seed": seed}
            arms = {arm: measured_arm(own, arm, arguments.work) for arm in ARMS}
            rows.append({"task": task, "seed": seed, **arms})
            print(page(rows), flush=True)
    least = min(
        statistics.median(ratios_of([row for row in rows if row["task"] == task], arm))
        for task in arguments.tasks
        for arm in ARMS
    )
    parts = (
        f"PPO, {arguments.envs} environments, {arguments.rounds} rounds (one episode per "
        "environment), `--backend torch`, all other settings at their defaults. Accuracy is "
        "committed validation accuracy, means over the last quarter of the rounds. The ratio is "
        "final accuracy over that in float32 with the same seed: mean and 95 % interval over "
        f"seeds, then the median, of which each must be at least {MIN_RATIO}: "
        f"{'they are' if least >= MIN_RATIO else 'THEY ARE NOT'}.",
        page(rows),
        f"{made_on()}.",
    )
    publish("precision", "Hosts in float32 and in half precision", parts, arguments.write, rows)
    return 0 if least >= MIN_RATIO else 1


if __name__ == "__main__":
    raise SystemExit(main())
