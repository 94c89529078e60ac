"""Pictures of PPO updates: losses, trust region, entropy and gradient per head, schedules."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from esper.karn.intervals import Floats
from esper.karn.report.blocks import blocks
from esper.karn.report.drawing import BAD, MUTED, Picture, legend, missing, panels, picture
from esper.karn.report.gather import RunData
from esper.karn.report.learning_figures import dot, look_of, whole_rounds
from esper.leyline.metrics import Metric, part_metric, parts_of

LEARNER = {
    Metric.POLICY_LOSS: "policy loss",
    Metric.HELD_OUT_POLICY_LOSS: "policy loss, held out",
    Metric.NEGATIVE_LOG_LIKELIHOOD: "- log likelihood, nats",
    Metric.VALUE_LOSS: "value loss",
    Metric.HELD_OUT_VALUE_LOSS: "value loss, held out",
    Metric.EXPLAINED_VARIANCE: "explained variance",
    Metric.EXPLAINED_VARIANCE_WITHIN_STEP: "explained var. in step",
    Metric.APPROX_KL: "approximate KL, nats",
    Metric.CLIP_FRACTION: "share of ratios clipped",
    Metric.RATIO_MAX: "largest ratio",
    Metric.GRAD_NORM: "gradient norm, unclipped",
}
"""Metrics of an update and their labels."""

SCHEDULES = (Metric.LEARNING_RATE, Metric.ENTROPY_WEIGHT, Metric.CLIP)
"""Metrics that a schedule sets; ``NAME/PART`` for each of their parts is included."""

_NONE: Floats = np.empty(0)

NO_UPDATE = "There are no policy updates."


def policy_pictures(runs: list[RunData]) -> list[Picture]:
    """Return pictures of the updates, or a sentence where there are none."""
    learners = [run for run in runs if len(run.updates)]
    if not learners:
        return [missing("Updates", NO_UPDATE)]
    return [
        _metrics(learners, "Updates", "Metrics of the updates.", LEARNER),
        _metrics(
            learners,
            "Entropy of each head",
            "Mean over the decisions in which the head had a choice. A ring at the bottom "
            "marks an update in which the head never had a choice.",
            _heads(learners, Metric.HEAD_ENTROPY, ", nats"),
        ),
        _metrics(
            learners,
            "Gradient norm of each head",
            "Gradient norm of the head's own parameters, on a logarithmic scale. At the bottom, a "
            "cross marks an update in which the gradient was missing; a ring marks one in which it "
            "was exactly 0, as for a head that never had a choice.",
            _heads(learners, Metric.HEAD_GRAD_NORMS),
            logarithmic=True,
        ),
        _metrics(
            learners,
            "Schedules",
            "Values of the schedules; equal ones are drawn once.",
            _schedules(learners),
            bottom=0.0,
        ),
    ]


def _metrics(
    runs: list[RunData],
    title: str,
    text: str,
    names: dict[str, str],
    logarithmic: bool = False,
    bottom: float | None = None,
) -> Picture:
    """Small panels with a shared x axis, one per metric; metrics that no run has are left out."""
    present = {
        name: label for name, label in names.items() if any(name in run.metrics for run in runs)
    }
    if not present:
        return missing(title, "The run did not record these metrics.")
    figure, grid = panels(len(present), 1.9)
    for axes, (name, label) in zip(grid, present.items(), strict=True):
        axes.set_title(label)
        axes.margins(y=0.15)
        for run in runs:
            if name not in run.metrics:
                continue
            marks = _marks(run, name, logarithmic)
            on_curve = ~np.any([where for where, _, _ in marks], axis=0)
            _line(axes, runs, run, np.where(on_curve, run.metrics[name], np.nan), logarithmic)
            for where, mark, why in marks:
                if where.any():
                    _mark(axes, run.updates[where], mark, why)
        axes.set_ylim(bottom=bottom)
    legend(figure)
    return picture(figure, title, text + _count_undefined(runs, present))


def _line(axes: Axes, runs: list[RunData], run: RunData, values: Floats, logarithmic: bool) -> None:
    x, rows = blocks(run.updates, values[:, None])
    if logarithmic and (rows > 0).any():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    axes.plot(x, rows[:, 0], marker=dot(x), **look_of(runs, run))
    whole_rounds(axes)


def _mark(axes: Axes, rounds: Floats, mark: str, label: str) -> None:
    """Draw marks at the bottom of the axes, for updates without a value on the curve."""
    where = np.full(len(rounds), 0.04)
    (line,) = axes.plot(rounds, where, mark, transform=axes.get_xaxis_transform())
    line.set(label=label, color=MUTED if mark == "o" else BAD, markerfacecolor="none")
    line.set(clip_on=False, markersize=4.5)


def _marks(run: RunData, name: str, logarithmic: bool) -> list[tuple[NDArray[np.bool_], str, str]]:
    """Updates whose value is not on the curve: (mask ``[U]``, mark, reason)."""
    values, missing = run.metrics[name], run.missing[name]
    nan_text = "not a number" if run.start.schema >= 3 else "missing or not a number"
    head = parts_of(Metric.HEAD_ENTROPY, [name]).get(name, "")
    choice = run.metrics.get(part_metric(Metric.HEAD_CHOICE, head))
    no_choice = choice == 0 if choice is not None else missing & False
    return [
        (missing, "x", "missing"),
        (np.isnan(values) & ~missing, "+", nan_text),
        (np.isinf(values), "^", "infinite"),
        (no_choice, "o", "no choice"),
        ((values == 0) & logarithmic, "o", "exactly 0"),
    ]


def _count_undefined(runs: list[RunData], names: dict[str, str]) -> str:
    """A sentence that counts missing and non-finite values per metric."""
    bad = {
        label: sum(int((~np.isfinite(run.metrics.get(name, _NONE))).sum()) for run in runs)
        for name, label in names.items()
    }
    counts = [f"{label} ({count})" for label, count in bad.items() if count]
    return f" Updates with missing or non-finite values: {', '.join(counts)}." if counts else ""


def _heads(runs: list[RunData], name: str, unit: str = "") -> dict[str, str]:
    metrics = parts_of(name, (metric for run in runs for metric in run.metrics))
    return {metric: head.replace("_", " ") + unit for metric, head in metrics.items()}


def _schedules(runs: list[RunData]) -> dict[str, str]:
    """The schedules with their labels; those that are equal in all runs share a panel."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    labels: dict[str, str] = {}
    for name in names:
        if name.split("/")[0] not in SCHEDULES:
            continue
        twin = next((candidate for candidate in labels if _equal(runs, name, candidate)), None)
        if twin is None:
            labels[name] = name.replace("_", " ")
        elif not name.startswith(f"{twin}/"):
            labels[twin] += f", {name.replace('_', ' ')}"
    return labels


def _equal(runs: list[RunData], name: str, twin: str) -> bool:
    pairs = [(run.metrics.get(name, _NONE), run.metrics.get(twin, _NONE)) for run in runs]
    return all(np.array_equal(one, its, equal_nan=True) for one, its in pairs)
