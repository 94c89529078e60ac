"""What does a lag of the acting policy cost, and how much of it does V-trace repair?

    OMP_NUM_THREADS=1 python benchmarks/impala_lag.py --write      # about an hour on one free core

Trains growth policies by IMPALA whose acting policy is 0, 1, 2, 4 and 8 updates old, with V-trace
and without correction, on the same seeds. Measures the utility on test and the gain (test utility
above the never-grow twin's) in the last fifth of the rounds, and how far the policies are apart.
Runs are kept under ``--work``: an interrupted run is resumed from its last checkpoint, and a
finished one is not repeated.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reporting import made_on, publish, table
from runs import Mean, Run, study_parser, trained

from esper.karn.intervals import interval
from esper.leyline.config import defaults_of
from esper.leyline.events import to_floats
from esper_lab.ladder_steps import points_text

CORRECTIONS = ("vtrace", "none")
Figures = dict[str, dict[str, list[float]]]
"""By name of a figure and of a kind of run: one number a seed."""


def kind(lag: int, correction: str) -> str:
    """Return the name of a kind of run, which is also that of its folder."""
    return f"lag{lag}-{correction}"


def measured(run: Run) -> dict[str, float]:
    """Return the figures of one run: utility and gain in points, divergence in nats."""
    outcomes = run.ends(5)[1]
    utility = np.mean([to_floats(outcome.test_utility) for outcome in outcomes])
    late = slice(-len(outcomes), None)
    return {
        "utility": 100.0 * float(utility),
        "gain": 100.0 * run.gain(outcomes).value,
        "lag_kl": float(run.metric("lag_kl")[late].mean()),
        "rho_clip_fraction": float(run.metric("rho_clip_fraction")[late].mean()),
    }


def spread(values: Sequence[float], spec: str = ".1f") -> str:
    """Return the mean over seeds with its standard error."""
    mean = Mean.of(values)
    error = "" if math.isnan(mean.error) else f" ± {mean.error:{spec}}"
    return f"{mean.value:{spec}}{error}"


def difference(one: Sequence[float], other: Sequence[float]) -> str:
    """Return the mean of the paired difference over seeds with its 95 % interval (Student's)."""
    values: NDArray[np.float64] = np.asarray(one) - np.asarray(other)
    if len(values) < 2:
        return f"{values.mean():+.1f}"
    found = interval(values[None])
    (mean,), (low,), (high,) = found.mean, found.low, found.high
    return points_text((mean, low, high))


def compared(figures: Figures, lags: Sequence[int]) -> str:
    """Return the results in Markdown, one line a lag."""
    heads = (
        "lag, updates",
        "utility with V-trace",
        "without correction",
        "V-trace minus none, 95 % interval",
        "gain with V-trace",
        "gain without correction",
        "KL of the lag, nats",
        "ratios clipped",
    )
    rows = []
    for lag in lags:
        one, other = (kind(lag, correction) for correction in CORRECTIONS)
        utility, gain = figures["utility"], figures["gain"]
        rows.append(
            (
                lag,
                spread(utility[one]),
                spread(utility[other]),
                difference(utility[one], utility[other]),
                spread(gain[one]),
                spread(gain[other]),
                spread(figures["lag_kl"][one], ".2g"),
                f"{100.0 * float(np.mean(figures['rho_clip_fraction'][one])):.0f} %",
            )
        )
    return table(heads, rows)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = study_parser(__doc__, "impala_lag", seeds=3, rounds=30)
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--envs", type=int, default=defaults_of("impala").world.envs)
    arguments = parser.parse_args()
    figures: Figures = {}
    for seed in arguments.seeds:
        for lag in arguments.lags:
            for correction in CORRECTIONS:
                name = kind(lag, correction)
                settings: dict[str, Any] = {
                    "task": arguments.task,
                    "rounds": arguments.rounds,
                    "envs": arguments.envs,
                    "seed": seed,
                    "lag": lag,
                    "correction": correction,
                    "threads": 1,
                }
                run = trained("impala", settings, arguments.work / f"{name}-seed{seed}")
                found = measured(run)
                print(f"seed {seed}, {name}: {found}", flush=True)
                for figure, value in found.items():
                    figures.setdefault(figure, {}).setdefault(name, []).append(value)
    parts = (
        f"`{arguments.task}`, {arguments.envs} environments, {arguments.rounds} updates, "
        f"{len(arguments.seeds)} seeds, all other settings at the defaults of `esper train "
        "impala`. Utility on test and gain are in points, means over the last fifth of the rounds "
        "with the standard error over seeds. Without correction every importance ratio is taken to "
        "be 1. Intervals are Student's, over seeds of the paired difference.",
        compared(figures, arguments.lags),
        f"{made_on('1 thread')}.",
    )
    title = "IMPALA: a lag of the acting policy, with and without V-trace"
    publish("impala_lag", title, parts, arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
