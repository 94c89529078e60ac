"""Pictures of rounds: accuracy, gain and return, PPO updates, throughput and anomalies."""

from collections import Counter
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from esper.karn.final_figures import FIGURES
from esper.karn.intervals import Floats
from esper.karn.report.drawing import (
    BAD,
    MUTED,
    Picture,
    band,
    bands,
    block_size,
    curve,
    curve_figure,
    guide,
    labelled_figure,
    look_of,
    panels,
    picture,
    whole_rounds,
    within,
)
from esper.karn.report.gather import RunData
from esper.leyline.metrics import Metric, part_metric, parts_of

MAX_DOTS = 800
"""Maximum number of dots per run, one per network."""

MAX_TASKS = 12

NO_TEST = (
    "This run has no test scores, which are recorded from schema 4 on; its difference from the "
    "twin on the validation split is below."
)
CURVES = (
    (
        "Gain over the twin",
        "Test utility (expected test accuracy minus the price of added parameters) minus that of "
        "the never-grow twin, in points. The test split is measured once, after the last step of "
        "an episode.",
        "points",
        "gain",
    ),
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
INTERVAL = (
    "Bands are 95 % intervals over groups of environments; of fewer than four groups, each has a "
    "thin curve"
)
NO_ROUND = "No round is complete yet."


def learning_pictures(runs: list[RunData]) -> list[Picture]:
    """Return curves over rounds, the gain per task, and accuracy against parameters."""
    with_rounds = [run for run in runs if len(run.rounds)]
    if not with_rounds:
        return [Picture("Accuracy", NO_ROUND)]
    has_no_test = gain_of(with_rounds) != "gain"
    pictures = [
        _accuracy(with_rounds),
        *([Picture(CURVES[0][0], NO_TEST)] if has_no_test else []),
        *(_curve(with_rounds, *each) for each in CURVES[has_no_test:]),
    ]
    if len(_tasks(with_rounds)) > 1:
        pictures.append(_gain_by_task(with_rounds))
    return [*pictures, _accuracy_against_parameters(with_rounds)]


def _accuracy(runs: list[RunData]) -> Picture:
    figure, axes = curve_figure("validation accuracy, %")
    for run in runs:
        colour, twin_colour, label, twin_label = _pair(runs, run)
        band(axes, run, 100 * run.outcomes["accuracy"], color=colour, label=label)
        look: dict[str, Any] = {"color": twin_colour, "label": twin_label, "linestyle": ":"}
        band(axes, run, 100 * run.outcomes["twin_accuracy"], **look)
    within(axes, 0.0, 100.0)
    text = (
        "Committed validation accuracy at the end of an episode, with only the fossilised seeds. "
        f"Dotted: the never-grow twin. {INTERVAL}."
    )
    if len(_tasks(runs)) > 1:
        text += " The bands include differences between tasks."
    size = max(block_size(len(run.rounds)) for run in runs)
    blocks_note = f" Each point is the mean of {size} rounds." if size > 1 else ""
    missing_values = _left_out(runs, "accuracy", "twin_accuracy")
    return picture(figure, "Accuracy", text + missing_values + blocks_note)


def _curve(runs: list[RunData], title: str, text: str, unit: str, outcome: str) -> Picture:
    figure, axes = curve_figure(unit)
    if unit == "points":
        guide(axes.axhline(0.0, color=MUTED, linewidth=0.8))
    bands(axes, runs, outcome)
    return picture(figure, title, f"{text} {INTERVAL}." + _left_out(runs, outcome))


def gain_of(runs: list[RunData]) -> str:
    """Return the outcome that compares environments: the gain, else the validation difference."""
    has_test = any(np.isfinite(run.outcomes["gain"]).any() for run in runs)
    return "gain" if has_test else "validation_gain"


def _gain_by_task(runs: list[RunData]) -> Picture:
    tasks, outcome = _tasks(runs)[:MAX_TASKS], gain_of(runs)
    figure, grid = panels(len(tasks), 2.0, FIGURES[outcome].label, sharey=True)
    for axes, task in zip(grid, tasks, strict=True):
        axes.set_title(task)
        guide(axes.axhline(0.0, color=MUTED, linewidth=0.8))
        for run in runs:
            gain = np.where(run.tasks == task, run.outcomes[outcome], np.nan)
            band(axes, run, gain, np.flatnonzero(np.isfinite(gain).any(1)), **look_of(runs, run))
    more = len(_tasks(runs)) - len(tasks)
    note = f" Tasks that are only in the table: {more}." if more else ""
    name, split = ("Gain", "Test") if outcome == "gain" else ("Validation difference", "Validation")
    return picture(
        figure,
        f"{name} by task",
        f"{split} utility minus the twin's, in points, in environments that trained on the task. "
        f"{INTERVAL}.{note}",
    )


def _accuracy_against_parameters(runs: list[RunData]) -> Picture:
    figure, axes = curve_figure("validation accuracy, %", "parameters of the network", height=3.2)
    for run in runs:
        last = run.final_rounds
        sizes = dict(zip(run.task_names, run.start.host_parameters, strict=False))
        host_size = np.vectorize(lambda task, s=sizes: float(s.get(task, np.nan)), otypes=[float])
        host = host_size(run.tasks)[last]
        size = host + run.outcomes["added_parameters"][last]
        grown, twin = (100 * run.outcomes[n][last] for n in ("accuracy", "twin_accuracy"))
        colour, twin_colour, label, twin_label = _pair(runs, run)
        dots: dict[str, Any] = {
            "s": 14,
            "color": colour,
            "alpha": 0.5,
            "linewidths": 0,
            "label": label,
        }
        diamonds: dict[str, Any] = {
            "s": 16,
            "marker": "D",
            "facecolors": "none",
            "edgecolors": twin_colour,
            "alpha": 0.6,
            "linewidths": 0.9,
            "label": twin_label,
        }
        pick = slice(None, None, -(-size.size // MAX_DOTS))
        for x, y, look in ((size, grown, dots), (host, twin, diamonds)):
            axes.scatter(x.ravel()[pick], y.ravel()[pick], **look)
    if len(_tasks(runs)) > 1:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
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


def _left_out(runs: list[RunData], *outcomes: str) -> str:
    """A sentence that counts values that are not finite; empty where there are none."""
    count = sum(int((~np.isfinite(run.outcomes[n])).sum()) for run in runs for n in outcomes)
    return f" Values that are not finite are left out: {count}." if count else ""


def _tasks(runs: list[RunData]) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task in run.task_names))


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
        return [Picture("Updates", NO_UPDATE)]
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
        return Picture(title, "The run did not record these metrics.")
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
    return picture(figure, title, text + _count_undefined(runs, present))


def _line(axes: Axes, runs: list[RunData], run: RunData, values: Floats, logarithmic: bool) -> None:
    estimate = curve(axes, run.updates, values[:, None], **look_of(runs, run))
    if logarithmic and (estimate.mean > 0).any():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())


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


MAY_BE_UNDEFINED = Metric.EXPLAINED_VARIANCE
"""Its value is not finite where returns do not vary, which is not an anomaly."""

NO_TIME = "No round was timed."


def throughput_pictures(runs: list[RunData]) -> list[Picture]:
    """Return pictures of environment steps per second and of seconds per rollout and update."""
    with_times = [run for run in runs if len(run.timed_rounds)]
    if not with_times:
        return [Picture("Throughput", NO_TIME)]
    (speed, axes), (seconds, time_axes) = (
        curve_figure(label, height=2.9)
        for label in ("environment steps per second", "seconds per round")
    )
    for run in with_times:
        look = look_of(with_times, run)
        times = np.column_stack([run.speed, *run.seconds])
        curve(axes, run.timed_rounds, times[:, :1], **look)
        suffix = f" {run.label}" if len(with_times) > 1 else ""
        for column, name, line in ((1, "rollout", "-"), (2, "update", ":")):
            look |= {"linestyle": line, "label": name + suffix}
            curve(time_axes, run.timed_rounds, times[:, column : column + 1], **look)
    for each in (axes, time_axes):
        each.set_ylim(bottom=0)
    return [
        picture(speed, "Throughput", "Steps of all environments; the time includes updates."),
        picture(seconds, "Time per round", "Wall time of the rollout and of the update."),
    ]


def anomaly_pictures(runs: list[RunData]) -> list[Picture]:
    """Return the picture of anomalies by kind and round."""
    with_anomalies = [(run, kinds) for run in runs if (kinds := anomalies(run))]
    if not with_anomalies:
        return [Picture("Anomalies", "None were recorded.")]
    names = list(dict.fromkeys(name for _, kinds in with_anomalies for _, name in kinds))[::-1]
    figure, axes = labelled_figure(names, "round", 0.8 + 0.28 * max(2, len(names)))
    axes.set_ylim(-0.6, len(names) - 0.4)
    whole_rounds(axes)
    for run, kinds in with_anomalies:
        rounds, heights = np.array([(r, names.index(n)) for r, n in kinds], dtype=float).T
        counts = np.array(list(kinds.values()), dtype=float)
        look = look_of(runs, run)
        colour = BAD if len(runs) == 1 else look["color"]
        size = 20 + 60 * counts / counts.max()
        axes.scatter(rounds, heights, s=size, marker="X", color=colour, alpha=0.7, linewidths=0,
                     label=look["label"])  # fmt: skip
    return [picture(figure, "Anomalies", "Larger marks mean more anomalies in the round.")]


def anomalies(run: RunData) -> Counter[tuple[int, str]]:
    """Count anomalies and rollbacks by round and name."""
    counts = Counter((event.round, event.kind.replace("_", " ")) for event in run.anomalies)
    for (number, reason), count in run.rollbacks.items():
        counts[number, f"rollback: {reason.lower().replace('_', ' ')}"] += count
    if run.start.schema < 3:
        counts += _metric_anomalies(run)
    return counts


def _metric_anomalies(run: RunData) -> Counter[tuple[int, str]]:
    """Anomalies in the updates of a run whose version had no anomaly detector."""
    counts: Counter[tuple[int, str]] = Counter()
    for name, values in run.metrics.items():
        if not name.startswith(MAY_BE_UNDEFINED):
            for number in run.updates[~np.isfinite(values)]:
                counts[int(number), f"not finite: {name}"] += 1
    for number in run.updates[run.metrics.get(Metric.REFUSED, np.zeros(len(run.updates))) > 0]:
        counts[int(number), "updates refused"] += 1
    return counts
