"""Pictures of the learner: losses, trust region, every head's entropy and gradient, schedules."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from esper.karn.report.drawing import (
    BAD,
    MUTED,
    Picture,
    legend,
    missing,
    panels,
    picture,
)
from esper.karn.report.gather import RunData
from esper.karn.report.intervals import Floats, blocks
from esper.karn.report.learning import colour_of, dashes_of, dot, name_of, whole_rounds

LEARNER = {
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "explained_variance": "explained variance",
    "explained_variance_within_step": "the same within a step",
    "approx_kl": "approximate KL, nats",
    "clip_fraction": "share of ratios clipped",
    "ratio_max": "largest ratio",
    "grad_norm": "gradient norm, unclipped",
}
"""Metrics of an update, and what they are called."""

ENTROPY, GRADIENT = "head_entropy/", "head_grad_norms/"

SCHEDULED = ("learning_rate", "entropy_weight", "entropy_coefficient", "clip_range")
"""Metrics that a schedule sets; also those that begin with one of them and a slash."""

_NONE: Floats = np.empty(0)

NO_UPDATE = "The policy does not learn: there were no updates."


def policy_pictures(runs: list[RunData]) -> list[Picture]:
    """Pictures of all updates; a sentence where there was none."""
    learned = [run for run in runs if len(run.updates)]
    if not learned:
        return [missing("Updates", NO_UPDATE)]
    return [
        _metrics(learned, "Updates", "Of each update.", LEARNER),
        _metrics(
            learned,
            "Entropy of each head",
            "Mean over the decisions in which the head had a choice, in nats.",
            _heads(learned, ENTROPY),
        ),
        _metrics(
            learned,
            "Gradient norm of each head",
            "Of the head's own parameters, logarithmic. At the bottom a cross marks an update in "
            "which a gradient was missing or not a number, which is never drawn as 0, and a ring "
            "one in which it was exactly 0, as in a head that had nothing to decide.",
            _heads(learned, GRADIENT),
            logarithmic=True,
        ),
        _metrics(
            learned, "Schedules", "What was set for each update.", _scheduled(learned), bottom=0.0
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
    """Small panels with a shared abscissa, one a metric; those that no run has are left out."""
    present = {
        name: label for name, label in names.items() if any(name in run.metrics for run in runs)
    }
    if not present:
        return missing(title, "The run did not record this.")
    figure, grid = panels(len(present), 4, 1.9)
    for axes, (name, label) in zip(grid, present.items(), strict=True):
        axes.set_title(label)
        axes.margins(y=0.15)
        for run in runs:
            if name in run.metrics:
                _line(axes, runs, run, run.metrics[name], logarithmic)
        _marks(axes, runs, name, logarithmic)
        axes.set_ylim(bottom=bottom)
    legend(figure)
    return picture(figure, title, text + _told(runs, present))


def _line(axes: Axes, runs: list[RunData], run: RunData, values: Floats, logarithmic: bool) -> None:
    x, rows = blocks(run.updates, np.where(np.isfinite(values), values, np.nan)[:, None])
    if logarithmic and (rows > 0).any():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        rows = np.where(rows > 0, rows, np.nan)
    label, dashes = name_of(runs, run), dashes_of(runs, run)
    axes.plot(x, rows[:, 0], dashes, color=colour_of(runs, run), label=label, marker=dot(x))
    whole_rounds(axes)


def _marks(axes: Axes, runs: list[RunData], name: str, logarithmic: bool) -> None:
    """At the bottom: crosses where a value is missing or not a number, triangles where infinite,
    rings where a logarithm cannot show a 0."""
    across = axes.get_xaxis_transform()
    for run in runs:
        values = run.metrics.get(name, np.full(len(run.updates), np.nan))
        for where, mark, label, colour in (
            (np.isnan(values), "x", "missing or not a number", BAD),
            (np.isinf(values), "^", "infinite", BAD),
            ((values == 0) & logarithmic, "o", "exactly 0", MUTED),
        ):
            if where.any():
                x = run.updates[where]
                (line,) = axes.plot(x, np.full(len(x), 0.04), mark, transform=across)
                line.set(label=label, color=colour, markerfacecolor="none")
                line.set(clip_on=False, markersize=4.5)


def _told(runs: list[RunData], names: dict[str, str]) -> str:
    """Which metrics were missing or not finite, in words."""
    bad = {
        label: sum(int((~np.isfinite(run.metrics.get(name, _NONE))).sum()) for run in runs)
        for name, label in names.items()
    }
    found = [f"{label} ({count})" for label, count in bad.items() if count]
    return f" Updates with a value missing or not finite: {', '.join(found)}." if found else ""


def _heads(runs: list[RunData], prefix: str) -> dict[str, str]:
    found = dict.fromkeys(n for run in runs for n in run.metrics if n.startswith(prefix))
    return {name: name.removeprefix(prefix).replace("_", " ") for name in found}


def _scheduled(runs: list[RunData]) -> dict[str, str]:
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return {
        name: name.replace("_", " ")
        for name in names
        if name in SCHEDULED or name.startswith(tuple(f"{s}/" for s in SCHEDULED))
    }
