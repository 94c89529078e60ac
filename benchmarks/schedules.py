"""Do warmup and cosine decay steady the update? The user's claim, measured.

    python benchmarks/schedules.py --write      # about half an hour on 2 cores

Trains the default growth policy on ``digits_shift`` at a constant step size and with
``--lr-warmup-frac 0.1 --lr-decay cosine`` over the same number of updates, on the same seeds. Of
each run: how much the value loss and the importance ratio scatter from update to update, around
their own trend, and the gain over the never-grow twin at the end. Intervals are those of a
bootstrap over seeds of the paired difference. Runs lie under ``--work``; one that was cut off goes
on from its last checkpoint, and one that is finished is not run again.
"""

import argparse
import math
from pathlib import Path

import numpy as np
from machine import made_on
from runs import mean_gain, trained

from esper.karn.store import read_events
from esper.leyline.config import TrainConfig, flatten
from esper.leyline.events import EpisodeOutcome, PPOUpdateCompleted
from esper.leyline.metrics import Metric

RESULTS = Path(__file__).parent / "results"
SCHEDULES: dict[str, dict[str, object]] = {
    "constant": {},
    "warmup and cosine": {"lr_warmup_frac": 0.1, "lr_decay": "cosine"},
}
DRAWS = 10_000
"""Of the bootstrap."""


def scatter(values: np.ndarray) -> float:
    """Variance of a series around its trend, a running mean of five updates.

    A loss that falls varies too; what is asked is how restless it is on its way.
    """
    kernel = np.ones(5) / 5.0
    trend = np.convolve(values, kernel, mode="valid")
    return float(np.var(values[2:-2] - trend))


def measured(run: Path, group_size: int) -> dict[str, float]:
    """The figures of one run."""
    updates = list(read_events(run, PPOUpdateCompleted))

    def series(name: str) -> np.ndarray:
        return np.array([float(u.metrics[name]) for u in updates])

    outcomes = list(read_events(run, EpisodeOutcome))
    last = outcomes[-math.ceil(len(outcomes) / 10) :]
    return {
        "variance of value loss": scatter(series(Metric.VALUE_LOSS)),
        "variance of the ratio": float(series(Metric.RATIO_VARIANCE).mean()),
        "largest ratio": float(series(Metric.RATIO_MAX).mean()),
        "share of clipped ratios": float(series(Metric.CLIP_FRACTION).mean()),
        "gain over the twin, points": 100.0 * mean_gain(last, group_size).value,
    }


def interval(differences: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of ``differences [seeds]`` by the percentile bootstrap."""
    draws = np.random.default_rng(0).choice(differences, (DRAWS, len(differences))).mean(1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)


def table(figures: dict[str, list[dict[str, float]]]) -> str:
    """The results in Markdown."""
    constant, scheduled = (figures[name] for name in SCHEDULES)
    lines = [
        "| mean over seeds | constant | warmup and cosine | difference, 95 % interval | sure |",
        "|---|---|---|---|---|",
    ]
    for name in constant[0]:
        before, after = (np.array([run[name] for run in runs]) for runs in (constant, scheduled))
        low, high = interval(after - before)
        sure = "no" if low <= 0.0 <= high else "yes"
        lines.append(
            f"| {name} | {before.mean():.4g} | {after.mean():.4g} "
            f"| {(after - before).mean():+.3g} [{low:+.3g}, {high:+.3g}] | {sure} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--work", type=Path, default=Path("runs/schedules"))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    common = {**flatten(TrainConfig()), "task": arguments.task, "rounds": arguments.rounds}
    common |= {"lr_decay_steps": arguments.rounds, "threads": 1}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    for seed in arguments.seeds:
        for name, schedule in SCHEDULES.items():
            folder = arguments.work / f"{name.replace(' ', '-')}-seed{seed}"
            run = trained("ppo", {**common, **schedule, "seed": seed}, folder)
            figures[name].append(measured(run, common["group_size"]))
            print(f"seed {seed}, {name}: {figures[name][-1]}", flush=True)
    text = (
        "# Warmup and cosine decay against a constant step size\n\n"
        f"`python benchmarks/schedules.py --rounds {arguments.rounds} "
        f"--seeds {' '.join(map(str, arguments.seeds))} --write`\n\n"
        f"`{arguments.task}`, {common['envs']} environments, {arguments.rounds} updates, "
        f"{len(arguments.seeds)} seeds, all other settings as they come. The variance of the value "
        "loss is that around its running mean of five updates; the variance of the ratio is the "
        "mean square of its distance from 1. Intervals by bootstrap over seeds of the paired "
        "difference; sure is what does not contain 0.\n\n"
        f"{table(figures)}\n\n"
        f"{made_on('1 thread')}.\n"
    )
    print(table(figures))
    if arguments.write:
        (RESULTS / "schedules.md").write_text(text)


if __name__ == "__main__":
    main()
