"""Pictures of throughput and of anomalies."""

from collections import Counter

import numpy as np

from esper.karn.report.blocks import blocks
from esper.karn.report.drawing import BAD, NARROW, Picture, legend, missing, new_figure, picture
from esper.karn.report.gather import RunData
from esper.karn.report.learning_figures import dot, look_of, whole_rounds
from esper.leyline.metrics import Metric

MAY_BE_UNDEFINED = Metric.EXPLAINED_VARIANCE
"""Its value is not finite where returns do not vary, which is not an anomaly."""

NO_TIME = "No round was timed."


def throughput_pictures(runs: list[RunData]) -> list[Picture]:
    """Return pictures of environment steps per second and of seconds per rollout and update."""
    with_times = [run for run in runs if len(run.timed_rounds)]
    if not with_times:
        return [missing("Throughput", NO_TIME)]
    speed, seconds = new_figure(), new_figure()
    axes = speed.add_subplot(xlabel="round", ylabel="environment steps per second")
    time_axes = seconds.add_subplot(xlabel="round", ylabel="seconds per round")
    for run in with_times:
        look = look_of(with_times, run)
        x, rows = blocks(run.timed_rounds, np.column_stack([run.speed, *run.seconds]))
        axes.plot(x, rows[:, 0], marker=dot(x), **look)
        suffix = f" {run.label}" if len(with_times) > 1 else ""
        for column, name, line in ((1, "rollout", "-"), (2, "update", ":")):
            look |= {"linestyle": line, "label": name + suffix}
            time_axes.plot(x, rows[:, column], marker=dot(x), **look)
    for figure, each in ((speed, axes), (seconds, time_axes)):
        each.set_ylim(bottom=0)
        whole_rounds(each)
        legend(figure)
    return [
        picture(speed, "Throughput", "Steps of all environments; the time includes updates."),
        picture(seconds, "Time per round", "Wall time of the rollout and of the update."),
    ]


def anomaly_pictures(runs: list[RunData]) -> list[Picture]:
    """Return the picture of anomalies by kind and round."""
    with_anomalies = [(run, kinds) for run in runs if (kinds := anomalies(run))]
    if not with_anomalies:
        return [missing("Anomalies", "None were recorded.")]
    names = list(dict.fromkeys(name for _, kinds in with_anomalies for _, name in kinds))[::-1]
    room = 0.3 + 0.066 * max(map(len, names))
    figure = new_figure(NARROW, 0.8 + 0.28 * max(2, len(names)), room)
    axes = figure.add_subplot(xlabel="round", yticks=range(len(names)), yticklabels=names)
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
    legend(figure)
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
