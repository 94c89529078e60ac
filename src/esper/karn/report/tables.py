"""The report's tables: final means with intervals, tasks, settings, machine fingerprint."""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esper.karn.final_figures import FIGURES, Figure
from esper.karn.intervals import Floats, group_means, interval
from esper.karn.learning_diagnosis import Curve, Verdict, diagnose
from esper.karn.report.curves import anomalies, gain_of
from esper.karn.report.gather import RunData
from esper.leyline.config import TrainConfig, flatten
from esper.leyline.phases import duration
from esper.leyline.precision_text import precision_text

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column names.

    Attributes:
        title: its heading.
        text: a sentence below the heading.
        columns: column names; the first is that of the row labels.
        rows: cells.
        numeric: whether all columns but the first hold numbers.
    """

    title: str
    text: str
    columns: list[str]
    rows: list[list[str]]
    numeric: bool = True


BY_TASK = (
    *("gain", "validation_gain", "test_accuracy", "twin_test_accuracy", "accuracy"),
    *("twin_accuracy", "added_parameters", "germinated", "fossilised"),
)
"""The figures in the tables by task."""


def tiles(run: RunData) -> list[tuple[str, str, str]]:
    """Return a run's key figures: (label, value, interval)."""
    length = (run.info.last_activity or 0) - (run.info.started or 0)
    steps = len(run.rounds) * run.start.envs * run.start.episode_length
    records = _records(run)
    figures = [
        ("status", run.info.status),
        ("epochs" if records else "rounds", f"{run.info.rounds_done} of {run.start.rounds}"),
        *([] if records else [("environment steps", f"{steps:,}")]),
        ("from first to last event", duration(length)),
    ]
    if np.isfinite(run.speed).any():
        figures.append(("steps per second", f"{np.nanmean(run.speed):,.0f}"))
    if len(run.rounds):
        gain, validation, size = (
            (_label(FIGURES[name]), final_figure(run, FIGURES[name]))
            for name in ("gain", "validation_gain", "added_parameters")
        )
        figures = [gain, validation, *figures, size]
    return [(name, *_split_interval(value)) for name, value in figures]


def _split_interval(value: str) -> tuple[str, str]:
    """Split text such as ``+1.0 [0.5, 1.5]`` into the mean and its interval, or an empty string."""
    figure, bracket, interval = value.partition(" [")
    return figure, bracket.strip() + interval


def summary(run: RunData) -> str:
    """Return a sentence or two on what was trained."""
    start, records = run.start, _records(run)
    if records:
        return (
            f"Policy that learned by {start.policy} from the records of {', '.join(records)}, "
            f"with tasks {', '.join(start.tasks)}; it did not act. Each round is an epoch, a "
            f"pass over the records. Device {start.device}."
        )
    hosts = zip(start.tasks, start.host_parameters, start.slots, strict=False)
    hosts_text = "; ".join(
        f"{task} (host of {size:,} parameters, slots {' '.join(slots)})"
        for task, size, slots in hosts
    )
    precision = precision_text(start.amp_dtype, start.amp_policy_dtype, is_mixed=start.amp_enabled)
    resumes = f" Number of resumes: {run.processes - 1}." if run.processes > 1 else ""
    return (
        f"Policy {start.policy} on {hosts_text}. Each round is one episode of {start.envs} "
        f"environments, {start.episode_length} steps each, in groups of {start.group_size} "
        f"that share the initial host, the data and one never-grow twin. Device {start.device}, "
        f"{precision}.{resumes}"
    )


def verdict(run: RunData) -> Verdict | None:
    """Return whether the policy is learning, and if not, why."""
    outcome = gain_of([run])
    curve = Curve(
        "gain" if outcome == "gain" else "validation difference",
        " points",
        [_mean(values) for values in run.outcomes[outcome]],
    )
    updates = [
        {name: None if run.missing[name][i] else run.metrics[name][i] for name in run.metrics}
        for i in range(len(run.updates))
    ]
    fossilised = [_mean(values) for values in run.outcomes["fossilised"]]
    return diagnose(curve, updates, fossilised)


def _mean(values: Floats) -> float:
    """Mean of the finite values; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def _records(run: RunData) -> list[str]:
    """Names of the runs whose records a run learned from; empty if it acted."""
    settings = run.config.get("offline", {}).get("settings", {})
    return [Path(path).name for path in settings.get("records", [])]


def _label(figure: Figure) -> str:
    return f"{figure.label}, %" if figure.accuracy else figure.label


def final_figure(run: RunData, figure: Figure, where: Floats | None = None) -> str:
    """Return the mean over the final rounds with its interval, or a dash.

    Environments of a group share initial host and data, so the units are the means of groups
    per round.

    Args:
        run: the run.
        figure: the figure to compute.
        where: bool ``[R, N]``, the environments to include; all by default.
    """
    values, form = run.outcomes[figure.name], ".1f" if figure.accuracy else figure.form
    if where is not None:
        values = np.where(where, values, np.nan)
    values = values[run.final_rounds] * (100 if figure.accuracy else 1)
    units = group_means(values, run.start.group_size).ravel()
    estimate = interval(units[None, np.isfinite(units)])
    mean, low, high = (float(x[0]) for x in (estimate.mean, estimate.low, estimate.high))
    if not np.isfinite(mean):
        return NOTHING
    if not np.isfinite(low):
        return format(mean, form)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def final_table(runs: list[RunData]) -> Table:
    """Return the final figures of all runs, one column per run."""
    with_rounds = [run for run in runs if len(run.rounds)]
    rows = [
        [_label(figure), *(final_figure(run, figure) for run in with_rounds)]
        for figure in FIGURES.values()
    ]
    return Table(
        "Final figures",
        "Means per episode over the last tenth of the rounds, with 95 % intervals. "
        "Environments of a group share initial host and data, so the units are groups of a round. "
        "Gain is test utility minus that of the never-grow twin. The test split is measured once, "
        "after the last step of an episode; runs before schema 4 have no test scores.",
        ["", *(run.label for run in with_rounds)],
        rows,
    )


def task_table(run: RunData, several: bool) -> Table | None:
    """Return the final figures per task; None where there is only one task."""
    if len(run.task_names) < 2 or not len(run.rounds):
        return None
    figures = [FIGURES[name] for name in BY_TASK]
    rows = [
        [task, *(final_figure(run, figure, run.tasks == task) for figure in figures)]
        for task in run.task_names
    ]
    return Table(
        f"By task{': ' + run.label if several else ''}",
        "Means over the last tenth of the rounds.",
        ["task", *map(_label, figures)],
        rows,
    )


def seed_table(run: RunData, several: bool) -> Table | None:
    """Return the number of seeds of each blueprint over all rounds, by outcome."""
    counts: Counter[tuple[str, str]] = Counter()
    for seeds in run.lives.seed_counts.values():
        for key, count in seeds.items():
            counts[key.blueprint, key.outcome] += count
            counts[key.blueprint, "germinated"] += count
    columns = ("germinated", "fossilised", "unfinished", "pruned", "rolled back")
    names = sorted({name for name, _ in counts}, key=lambda n: (-counts[n, "germinated"], n))
    rows = [[name, *(str(counts[name, column]) for column in columns)] for name in names]
    title = f"Blueprints over all rounds{': ' + run.label if several else ''}"
    text = "Seeds by outcome; unfinished seeds were alive when their episode ended."
    return Table(title, text, ["blueprint", *columns], rows) if rows else None


def anomaly_table(runs: list[RunData]) -> Table | None:
    """Return anomalies with counts and rounds; None where there are none."""
    rows = []
    for run in runs:
        counts = anomalies(run)
        messages = {event.kind.replace("_", " "): event.message for event in run.anomalies}
        for name in dict.fromkeys(name for _, name in counts):
            rounds = [number for number, kind in counts if kind == name]
            count = sum(counts[number, name] for number in rounds)
            row = [name, run.label, str(count), str(min(rounds)), str(max(rounds))]
            rows.append([*row, messages.get(name, NOTHING)])
    columns = ["kind", "run", "count", "first in round", "last in round", "last message"]
    return Table("Anomalies by kind", "", columns, rows, False) if rows else None


def settings_table(runs: list[RunData]) -> Table:
    """Return all settings of one run, or those in which several runs differ."""
    settings = [run.config.get("settings", {}) for run in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    if len(runs) > 1:
        names = [n for n in names if len({_text(each.get(n)) for each in settings}) > 1]
        rows = [[name, *(_text(each.get(name)) for each in settings)] for name in names]
        text = "Settings in which the runs differ." if rows else "The runs have the same settings."
        return Table("Settings", text, ["setting", *(run.label for run in runs)], rows, False)
    defaults = flatten(TrainConfig())
    rows = [
        [name, _text(settings[0][name]), _text(defaults[name]) if name in defaults else NOTHING]
        for name in names
    ]
    text = "Resolved values and the defaults."
    return Table("Settings", text, ["setting", "value", "default"], rows, False)


def fingerprint_table(runs: list[RunData]) -> Table:
    """Return the machine and versions that a bit-identical result requires."""
    prints = [
        (label, versions)
        for run in runs
        for label, versions in (
            (run.label, run.config.get("fingerprint", {})),
            *((f"{run.label}, resumed", later) for later in run.config.get("resumed", [])),
        )
    ]
    names = dict.fromkeys(name for _, versions in prints for name in versions)
    rows = [[name, *(_text(versions.get(name)) for _, versions in prints)] for name in names]
    columns = ["", *(label for label, _ in prints)]
    return Table("Machine and versions", "", columns, rows, False)


def moment(seconds: float | None) -> str:
    """Return a time as text, in UTC."""
    if seconds is None:
        return NOTHING
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _text(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value) or NOTHING
    return value if isinstance(value, str) else json.dumps(value)
