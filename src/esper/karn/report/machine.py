"""Pictures of how fast it went and of what went wrong."""

from collections import Counter

import numpy as np

from esper.karn.report.drawing import (
    BAD,
    Picture,
    legend,
    missing,
    new_figure,
    picture,
)
from esper.karn.report.gather import RunData
from esper.karn.report.learning import colour_of, dashes_of, name_of

NO_TIME = "No round was timed."


def throughput_pictures(runs: list[RunData]) -> list[Picture]:
    """Environment steps a second, and where the time of a round went."""
    timed = [run for run in runs if len(run.timed)]
    if not timed:
        return [missing("Throughput", NO_TIME)]
    speed, seconds = new_figure(), new_figure()
    axes = speed.add_subplot(xlabel="round", ylabel="environment steps a second")
    below = seconds.add_subplot(xlabel="round", ylabel="seconds a round")
    for run in timed:
        colour, dashes, label = colour_of(timed, run), dashes_of(timed, run), name_of(timed, run)
        dot = "." if len(run.timed) < 40 else ""
        axes.plot(run.timed, run.speed, dashes, color=colour, label=label, marker=dot)
        suffix = f" {run.label}" if len(timed) > 1 else ""
        below.plot(run.timed, run.rollout_seconds, color=colour, marker=dot,
                   label=f"rollout{suffix}")  # fmt: skip
        below.plot(run.timed, run.update_seconds, ":", color=colour, marker=dot,
                   label=f"update{suffix}")  # fmt: skip
    axes.set_ylim(bottom=0)
    below.set_ylim(bottom=0)
    legend(axes)
    legend(below)
    return [
        picture(speed, "Throughput", "Steps of all environments, updates included."),
        picture(seconds, "Time of a round", "Wall time of its two halves."),
    ]


def anomaly_pictures(runs: list[RunData]) -> list[Picture]:
    """When what went wrong."""
    found = [(run, kinds) for run in runs if (kinds := anomalies(run))]
    if not found:
        return [missing("Anomalies", "None were recorded.")]
    names = list(dict.fromkeys(name for _, kinds in found for _, name in kinds))[::-1]
    figure = new_figure(9.6, 1.2 + 0.28 * len(names))
    axes = figure.add_subplot(xlabel="round", yticks=range(len(names)), yticklabels=names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    for run, kinds in found:
        rounds, places = np.array([(r, names.index(n)) for r, n in kinds], dtype=float).T
        counts = np.array(list(kinds.values()), dtype=float)
        colour = BAD if len(runs) == 1 else colour_of(runs, run)
        size = 20 + 60 * counts / counts.max()
        axes.scatter(rounds, places, s=size, marker="X", color=colour, alpha=0.7, linewidths=0,
                     label=name_of(runs, run))  # fmt: skip
    legend(axes)
    return [picture(figure, "Anomalies", "The larger the mark, the more of them in the round.")]


def anomalies(run: RunData) -> Counter[tuple[int, str]]:
    """How often what went wrong, by round and name."""
    found: Counter[tuple[int, str]] = Counter()
    for (number, reason), count in run.rollbacks.items():
        found[number, f"rollback: {reason.lower().replace('_', ' ')}"] += count
    for name, label in (("refused", "update refused"), ("stopped", "stopped by the KL bound")):
        for number, value in zip(run.updates, run.metrics.get(name, ()), strict=False):
            if value > 0:
                found[int(number), label] += 1
    for name, values in run.metrics.items():
        for number in run.updates[~np.isfinite(values)]:
            found[int(number), f"not finite: {name}"] += 1
    return found
