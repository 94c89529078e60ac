"""Pictures of learning: accuracy, gain, return, and accuracy against parameters."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from esper.karn.final_figures import FIGURES, last_tenth
from esper.karn.intervals import Floats, group_means, interval
from esper.karn.report.blocks import block_size, blocks
from esper.karn.report.drawing import (
    DASHES,
    MUTED,
    SERIES,
    Picture,
    guide,
    legend,
    missing,
    new_figure,
    panels,
    picture,
)
from esper.karn.report.gather import RunData

MAX_DOTS = 800
"""Maximum number of dots per run, one per network."""

MAX_TASKS = 12

NO_TEST = (
    "This run has no test scores, which are recorded from schema 4 on; its difference from the "
    "twin on the validation split is below."
)
GAIN_TEXT = (
    "Test utility (expected test accuracy minus the price of added parameters) minus that of the "
    "never-grow twin, in points. The test split is measured once, after the last step of an "
    "episode."
)
CURVES = (
    (
        "Validation difference",
        "Validation utility minus that of the never-grow twin, in points. The policy is trained on "
        "this split.",
        "points",
        "validation_gain",
    ),
    ("Return", "Sum of the rewards of an episode.", "sum of rewards", "episode_return"),
)
"""Title, text, unit and figure of a curve over rounds."""
INTERVAL = "Bands are 95 % intervals over groups of environments"
NO_ROUND = "No round is complete yet."


def learning_pictures(runs: list[RunData]) -> list[Picture]:
    """Return curves over rounds, the gain per task, and accuracy against parameters."""
    with_rounds = [run for run in runs if len(run.rounds)]
    if not with_rounds:
        return [missing("Accuracy", NO_ROUND)]
    pictures = [
        _accuracy(with_rounds),
        _gain(with_rounds),
        *(_curve(with_rounds, *each) for each in CURVES),
    ]
    if len(_tasks(with_rounds)) > 1:
        pictures.append(_gain_by_task(with_rounds))
    return [*pictures, _accuracy_against_parameters(with_rounds)]


def band(axes: Axes, rounds: Floats, values: Floats, group_size: int, **look: Any) -> None:
    """Draw the mean over groups of environments with its interval.

    Args:
        axes: where to draw.
        rounds: ``[R]``.
        values: ``[R, N]``, R rounds of N environments.
        group_size: environments per group.
        look: properties of the line; its ``color`` is also that of the interval.
    """
    x, rows = blocks(rounds, group_means(values, group_size))
    estimate = interval(rows)
    axes.plot(x, estimate.mean, marker=dot(x), **look)
    whole_rounds(axes)
    if np.isfinite(estimate.low).any():
        shade = axes.fill_between(x, estimate.low, estimate.high, color=look["color"], linewidth=0)
        shade.set_alpha(0.18)


def dot(x: Floats) -> str:
    """Return the marker of a curve: a dot if the curve has fewer than 40 points."""
    return "." if len(x) < 40 else ""


def whole_rounds(axes: Axes) -> None:
    """Put the ticks of the x axis at whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def look_of(runs: list[RunData], run: RunData) -> dict[str, Any]:
    """Return colour and dashes of a run among others, and its label where there are several."""
    number = runs.index(run)
    return {
        "color": SERIES[number % len(SERIES)],
        "linestyle": DASHES[number % len(DASHES)],
        "label": run.label if len(runs) > 1 else None,
    }


def _accuracy(runs: list[RunData]) -> Picture:
    figure = new_figure(height=3.0)
    axes = figure.add_subplot(xlabel="round", ylabel="validation accuracy, %")
    for run in runs:
        colour, twin_colour, label, twin_label = _pair(runs, run)
        grown, never = (100 * run.outcomes[name] for name in ("accuracy", "twin_accuracy"))
        band(axes, run.rounds, grown, run.start.group_size, color=colour, label=label)
        look = {"color": twin_colour, "label": twin_label, "linestyle": ":"}
        band(axes, run.rounds, never, run.start.group_size, **look)
    legend(figure)
    text = (
        "Committed validation accuracy at the end of an episode, with only the fossilised seeds. "
        f"Dotted: the never-grow twin. {INTERVAL}."
    )
    if len(_tasks(runs)) > 1:
        text += " The bands include differences between tasks."
    missing_values = _left_out(runs, "accuracy", "twin_accuracy")
    return picture(figure, "Accuracy", text + missing_values + _block_note(runs))


def _curve(runs: list[RunData], title: str, text: str, unit: str, outcome: str) -> Picture:
    figure = new_figure(height=3.0)
    axes = figure.add_subplot(xlabel="round", ylabel=unit)
    if unit == "points":
        guide(axes.axhline(0.0, color=MUTED, linewidth=0.8))
    for run in runs:
        values = run.outcomes[outcome]
        band(axes, run.rounds, values, run.start.group_size, **look_of(runs, run))
    legend(figure)
    return picture(figure, title, f"{text} {INTERVAL}." + _left_out(runs, outcome))


def gain_of(runs: list[RunData]) -> str:
    """Return the outcome that compares environments: the gain, else the validation difference."""
    has_test = any(np.isfinite(run.outcomes["gain"]).any() for run in runs)
    return "gain" if has_test else "validation_gain"


def _gain(runs: list[RunData]) -> Picture:
    title = "Gain over the twin"
    if gain_of(runs) != "gain":
        return missing(title, NO_TEST)
    return _curve(runs, title, GAIN_TEXT, "points", "gain")


def _gain_by_task(runs: list[RunData]) -> Picture:
    tasks, outcome = _tasks(runs)[:MAX_TASKS], gain_of(runs)
    figure, grid = panels(len(tasks), 2.0, FIGURES[outcome].label, sharey=True)
    for axes, task in zip(grid, tasks, strict=True):
        axes.set_title(task)
        guide(axes.axhline(0.0, color=MUTED, linewidth=0.8))
        for run in runs:
            gain = np.where(run.tasks == task, run.outcomes[outcome], np.nan)
            rows = np.isfinite(gain).any(1)
            band(
                axes,
                run.rounds[rows],
                gain[rows],
                run.start.group_size,
                **look_of(runs, run),
            )
    legend(figure)
    more = len(_tasks(runs)) - len(tasks)
    note = f" Tasks that are only in the table: {more}." if more else ""
    return picture(
        figure,
        "Gain by task" if outcome == "gain" else "Validation difference by task",
        f"{'Test' if outcome == 'gain' else 'Validation'} utility minus the twin's, in points, in "
        f"environments that trained on the task. {INTERVAL}.{note}",
    )


def _accuracy_against_parameters(runs: list[RunData]) -> Picture:
    figure = new_figure(height=3.2)
    axes = figure.add_subplot(xlabel="parameters of the network", ylabel="validation accuracy, %")
    for run in runs:
        last = final_rounds(run)
        host = _host_parameters(run)[last]
        size = host + run.outcomes["added_parameters"][last]
        pick = slice(None, None, -(-size.size // MAX_DOTS))
        grown, twin = (100 * run.outcomes[n][last] for n in ("accuracy", "twin_accuracy"))
        colour, twin_colour, label, twin_label = _pair(runs, run)
        axes.scatter(
            size.ravel()[pick],
            grown.ravel()[pick],
            s=14,
            color=colour,
            alpha=0.5,
            linewidths=0,
            label=label,
        )
        axes.scatter(
            host.ravel()[pick],
            twin.ravel()[pick],
            s=16,
            marker="D",
            facecolors="none",
            edgecolors=twin_colour,
            alpha=0.6,
            linewidths=0.9,
            label=twin_label,
        )
    if len(_tasks(runs)) > 1:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
    legend(figure)
    return picture(
        figure,
        "Accuracy against parameters",
        "Validation accuracy. Each dot is a network at the end of an episode in the last tenth of "
        "the rounds, with only its fossilised seeds; each diamond is a twin.",
    )


def _pair(runs: list[RunData], run: RunData) -> tuple[str, str, str, str | None]:
    """Colours of a run's networks and of their twins, and their labels."""
    colour = look_of(runs, run)["color"]
    if len(runs) > 1:
        return colour, colour, run.label, None
    return colour, MUTED, "grown", "never-grow twin"


def final_rounds(run: RunData) -> slice:
    """Return the last tenth of the completed rounds, at least one."""
    return slice(-last_tenth(len(run.rounds)), None)


def _left_out(runs: list[RunData], *outcomes: str) -> str:
    """A sentence that counts values that are not finite; empty where there are none."""
    count = sum(int((~np.isfinite(run.outcomes[n])).sum()) for run in runs for n in outcomes)
    return f" Values that are not finite are left out: {count}." if count else ""


def _host_parameters(run: RunData) -> Floats:
    """Parameters of each environment's host, ``[R, N]``."""
    sizes = dict(zip(run.task_names, run.start.host_parameters, strict=False))
    return np.vectorize(lambda task: float(sizes.get(task, np.nan)), otypes=[float])(run.tasks)


def _tasks(runs: list[RunData]) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task in run.task_names))


def _block_note(runs: list[RunData]) -> str:
    size = max(block_size(len(run.rounds)) for run in runs)
    return f" Each point is the mean of {size} rounds." if size > 1 else ""
