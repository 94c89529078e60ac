"""Which lambda and which baseline should ``esper train ppo`` have on its default task?

    python benchmarks/growth_defaults.py --write     # half an hour on a core; resumable

Every run is ``esper train ppo`` with the defaults of before 2026-11-27, without the baseline of the
group, but for what the name says. The gain is that of the test split over the never-grow twin,
price included, in points, as the policy acts while it learns. Differences are paired by seed;
brackets hold 95 % intervals over seeds (Student's t; from 20 on bootstrap).
"""

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from reporting import kept, made_on, new_parser, publish, table

from esper.karn.intervals import interval
from esper.leyline.actions import Op
from esper.leyline.config import unflatten
from esper.leyline.metrics import Metric
from esper.simic.training.vectorized import run_training
from esper.tamiyo.policy.factored_lstm import OP_BIAS
from esper_lab.ladder_steps import points_text

SEEDS, MORE_SEEDS, BIAS_SEEDS, LAST = range(1, 9), range(1, 25), range(1, 17), 5
DEFAULTS, BIAS = "defaults", "bias"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULTS: {"group_baseline": False},
    "lambda 1": {"trace_decay": 1.0, "group_baseline": False},
    "group baseline": {"group_baseline": True},
    "lambda 1, group baseline": {"trace_decay": 1.0, "group_baseline": True},
}
"""Variants by the name of their files; since 2026-11-27 the group's baseline is the default."""
BIASES: dict[str, dict[str, Any]] = {
    "group baseline": {"group_baseline": True},
    "germinate 2": {"group_baseline": True, BIAS: 2.0},
}
"""The same for the initial bias of the op head for germinating, which was 0 before."""
SHORT: dict[str, Any] = {"envs": 16, "rounds": 20, "group_baseline": True}
SHORT_SEEDS, SHORT_LAST, STUCK = range(100, 108), 3, 1.0
"""Short runs; one whose last gains are below ``STUCK`` points has stopped growing."""


def short_rows(work: Path) -> list[tuple[str, ...]]:
    """Short runs with slots behind layers or across them, and biases for germinating."""
    rows: list[tuple[str, ...]] = []
    for slots in ((), ("wide",)):
        for bias in (0.0, 1.0, 2.0):
            name = f"short {' '.join(slots) or 'default'} {bias:g}"
            settings = SHORT | {BIAS: bias, "slots": slots}
            runs = [
                kept(work / f"{name}-{seed}.json", partial(outcome, settings, seed, work))["gain"]
                for seed in SHORT_SEEDS
            ]
            last = [fmean(run[-SHORT_LAST:]) for run in runs]
            every = text([fmean(run) for run in runs], ".1f")
            stuck = f"{sum(x < STUCK for x in last)} of {len(runs)}"
            rows.append(
                (" ".join(slots) or "default", f"{bias:g}", text(last, ".1f"), every, stuck)
            )
            print(*rows[-1], flush=True)
    return rows


def outcome(settings: dict[str, Any], seed: int, work: Path) -> dict[str, list[float]]:
    """Gain in points and explained variance within a step, round by round."""
    settings = dict(settings)
    OP_BIAS[Op.GERMINATE] = settings.pop(BIAS, 0.0)
    folder = str(work / "runs")
    common = {"seed": seed, "threads": 1, "telemetry_level": "minimal", "telemetry_dir": folder}
    rounds = run_training(unflatten(common | settings), "ppo").rounds
    return {
        "gain": [one.gain for one in rounds],
        "explained": [one.metrics[Metric.EXPLAINED_VARIANCE_WITHIN_STEP] for one in rounds],
    }


def text(values: list[float], form: str) -> str:
    """The mean over seeds and its interval."""
    estimate = interval(np.array([values]))
    return points_text([float(x[0]) for x in (estimate.mean, estimate.low, estimate.high)], form)


def rows_of(
    variants: dict[str, dict[str, Any]], seeds: range, work: Path
) -> tuple[list[tuple[str, ...]], dict[str, dict[str, list[float]]]]:
    """Train what was not trained; the rows of the table, and the gains of each seed by variant."""
    rows: list[tuple[str, ...]] = []
    figures = {}
    plain: dict[str, list[float]] = {}
    for name, settings in variants.items():
        results = [
            kept(work / f"{name}-{seed}.json", partial(outcome, settings, seed, work))
            for seed in seeds
        ]
        last = [fmean(one["gain"][-LAST:]) for one in results]
        every = [fmean(one["gain"]) for one in results]
        first = not plain
        plain = plain or {"last": last, "every": every}
        explained = fmean(fmean(one["explained"][-LAST:]) for one in results)
        differences = [
            "" if first else text([a - b for a, b in zip(*pair, strict=True)], "+.1f")
            for pair in ((last, plain["last"]), (every, plain["every"]))
        ]
        gains = text(last, ".1f"), differences[0], text(every, ".1f"), differences[1]
        rows.append((name, *gains, f"{explained:.2f}"))
        figures[name] = {"last": last, "every": every}
        print(*rows[-1], flush=True)
    return rows, figures


def main() -> None:
    """Train all variants and print the page."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/growth_defaults"))
    arguments = parser.parse_args()
    rows, figures = rows_of(VARIANTS, SEEDS, arguments.work)
    best = {name: VARIANTS[name] for name in (DEFAULTS, "group baseline")}
    more_rows, more_figures = rows_of(best, MORE_SEEDS, arguments.work)
    bias_rows, bias_figures = rows_of(BIASES, BIAS_SEEDS, arguments.work)
    figures |= {f"{name}, {len(BIAS_SEEDS)} seeds": bias_figures[name] for name in bias_figures}
    figures |= {f"{name}, {len(MORE_SEEDS)} seeds": more_figures[name] for name in more_figures}
    heads = (
        "PPO with", f"gain in the last {LAST} of 30 rounds", "minus defaults",
        "mean gain over all rounds", "minus defaults", "explained variance within a step",
    )  # fmt: skip
    short_heads = (
        "slots", "bias", f"gain in the last {SHORT_LAST} rounds", "mean gain over all rounds",
        f"runs that end below {STUCK:g} point",
    )  # fmt: skip
    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    parts = [
        f"{len(SEEDS)} seeds. {about}", table(heads, rows),
        f"{len(MORE_SEEDS)} seeds:", table(heads, more_rows),
        "## The initial bias for germinating",
        f"{len(BIAS_SEEDS)} seeds:", table(heads, bias_rows),
        f"{SHORT['rounds']} rounds of {SHORT['envs']} environments, {len(SHORT_SEEDS)} seeds:",
        table(short_heads, short_rows(arguments.work)), f"{made_on('1 thread')}.",
    ]  # fmt: skip
    publish("growth_defaults", "Defaults of PPO on growth", parts, arguments.write, figures)


if __name__ == "__main__":
    main()
