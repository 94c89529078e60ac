"""Do warmup and cosine decay make updates steadier? Measures the scatter of update metrics.

    python benchmarks/schedules.py --write      # about half an hour on 2 cores

Trains the default growth policy on ``digits_shift`` at a constant learning rate and with
``--lr-warmup-frac 0.1 --lr-decay cosine`` over the same number of updates, on the same seeds.
Measures, for each run, how much the value loss and the importance ratio scatter from update to
update around their trend; what growing gains is measured against controls by suite.py. Intervals
are Student's, over seeds of the paired difference. Runs are kept under ``--work``: an interrupted
run is resumed from its last checkpoint, and a finished one is not repeated.
"""

import numpy as np
from numpy.typing import NDArray
from reporting import made_on, publish, table
from runs import Run, study_parser, trained

from esper.karn.intervals import interval
from esper.leyline.config import TrainConfig

SCHEDULES: dict[str, dict[str, object]] = {
    "constant": {},
    "warmup and cosine": {"lr_warmup_frac": 0.1, "lr_decay": "cosine"},
}


def scatter(values: NDArray[np.float64]) -> float:
    """Return the variance of a series around its trend, a running mean of five updates.

    The trend is subtracted because a falling loss varies even when its updates are steady.
    """
    trend = np.convolve(values, np.ones(5) / 5.0, mode="valid")
    return float(np.var(values[2:-2] - trend))


def measured(run: Run) -> dict[str, float]:
    """Return the figures of one run."""
    return {
        "variance of value loss": scatter(run.metric("value_loss")),
        "variance of the ratio": float(run.metric("ratio_variance").mean()),
        "largest ratio": float(run.metric("ratio_max").mean()),
        "share of clipped ratios": float(run.metric("clip_fraction").mean()),
    }


def compared(figures: dict[str, list[dict[str, float]]]) -> str:
    """Return the results in Markdown."""
    constant, scheduled = (figures[name] for name in SCHEDULES)
    rows = []
    for name in constant[0]:
        before, after = (np.array([run[name] for run in runs]) for runs in (constant, scheduled))
        found = interval((after - before)[None])
        (mean,), (low,), (high,) = found.mean, found.low, found.high
        difference = f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]"
        excludes = "yes" if low > 0.0 or high < 0.0 else "no"
        rows.append((name, f"{before.mean():.4g}", f"{after.mean():.4g}", difference, excludes))
    heads = ("mean over seeds", *SCHEDULES, "difference, 95 % interval", "interval excludes 0")
    return table(heads, rows)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = study_parser(__doc__, "schedules", seeds=5, rounds=30)
    parser.add_argument("--task", default="digits_shift")
    arguments = parser.parse_args()
    common = {"task": arguments.task, "rounds": arguments.rounds}
    common |= {"lr_decay_steps": arguments.rounds, "threads": 1}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    for seed in arguments.seeds:
        for name, schedule in SCHEDULES.items():
            folder = arguments.work / f"{name.replace(' ', '-')}-seed{seed}"
            run = trained("ppo", {**common, **schedule, "seed": seed}, folder)
            figures[name].append(measured(run))
            print(f"seed {seed}, {name}: {figures[name][-1]}", flush=True)
    parts = (
        f"`{arguments.task}`, {TrainConfig().world.envs} environments, {arguments.rounds} updates, "
        f"{len(arguments.seeds)} seeds, all other settings at their defaults. The variance of the "
        "value loss is that around its running mean of five updates; the variance of the ratio is "
        "the mean square of its distance from 1. Intervals are Student's, over seeds of the "
        "paired difference.",
        compared(figures),
        f"{made_on('1 thread')}.",
    )
    title = "Warmup and cosine decay against a constant learning rate"
    publish("schedules", title, parts, arguments.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
