"""One HTML file that tells what a run did, without a network or a script in it."""

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from esper.karn.store import read_events
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    AnalyticsSnapshot,
    EpisodeOutcome,
    Number,
    PPOUpdateCompleted,
    TrainingStarted,
    to_floats,
)

# The same run gives the same file.
matplotlib.rcParams["svg.hashsalt"] = "esper"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Esper: {{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #8884; }
svg { max-width: 100%; height: auto; } pre { overflow-x: auto; }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
{% for heading, text, picture in plots %}<h2>{{ heading }}</h2><p>{{ text }}</p>{{ picture | safe }}
{% endfor %}
<h2>First and last rounds</h2>
<table><tr><th>mean of an episode</th>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for label, cells in rows %}<tr><td>{{ label }}</td>{% for cell in cells %}<td>{{ cell }}</td>
{% endfor %}</tr>{% endfor %}</table>
<h2>Settings and machine</h2><pre>{{ config }}</pre>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """A mean over environments for every round, with its standard error."""

    label: str
    mean: list[float]
    error: list[float]

    @classmethod
    def over(cls, label: str, values: list[list[Number]]) -> "Curve":
        rows = np.array([to_floats(row) for row in values])
        spread = rows.std(1, ddof=1) if rows.shape[1] > 1 else np.zeros(len(rows))
        return cls(label, rows.mean(1).tolist(), (spread / math.sqrt(rows.shape[1])).tolist())


def write_report(run: Path) -> Path:
    """Write ``report.html`` into a run directory.

    Raises:
        UsageError: the run has no finished round.
    """
    outcomes = list(read_events(run, EpisodeOutcome))
    started = next(read_events(run, TrainingStarted), None)
    if not outcomes or started is None:
        raise UsageError(f"run: {run} has no finished round yet; nothing to report")
    updates = list(read_events(run, PPOUpdateCompleted))
    speed = [s.environment_steps_per_second for s in read_events(run, AnalyticsSnapshot)]
    rounds = [o.round for o in outcomes]
    grown = Curve.over("grown (committed)", [o.accuracy for o in outcomes])
    twin = Curve.over("never-grow twin", [o.twin_accuracy for o in outcomes])
    plots = [
        (
            "Accuracy",
            "Committed validation accuracy, mean over environments with two standard errors.",
            _plot(rounds, [grown, twin], "accuracy"),
        ),
        (
            "Seeds",
            "Seeds an episode, by what became of them.",
            _plot(
                rounds,
                [
                    Curve.over("germinated", [list(o.germinated) for o in outcomes]),
                    Curve.over("fossilised", [list(o.fossilised) for o in outcomes]),
                    Curve.over("pruned", [list(o.pruned) for o in outcomes]),
                ],
                "seeds an episode",
            ),
        ),
    ]
    if updates:
        plots.append(
            (
                "Learning",
                "Of each update; explained variance within a time step cannot be had from knowing "
                "the time.",
                _plot(
                    [u.round for u in updates],
                    [
                        _metric(updates, "explained_variance_within_step"),
                        _metric(updates, "entropy"),
                        _metric(updates, "value_loss"),
                    ],
                    "",
                ),
            )
        )
    columns, rows = _first_and_last(outcomes)
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(_PAGE)
    text = page.render(
        title=f"{', '.join(started.tasks)}: {started.policy}",
        summary=(
            f"{len(outcomes)} rounds of {started.envs} environments, "
            f"{started.episode_length} steps each, "
            f"{_hosts(started)}, on {started.device}; "
            f"{fmean(speed):.0f} environment steps per second."
        ),
        plots=plots,
        columns=columns,
        rows=rows,
        config=json.dumps(json.loads((run / "config.json").read_text()), indent=2),
    )
    target = run / "report.html"
    target.write_text(text, encoding="utf-8")
    return target


def _hosts(started: TrainingStarted) -> str:
    """The hosts of all tasks in words, each once."""
    found = dict.fromkeys(zip(started.host_parameters, map(tuple, started.slots), strict=True))
    return ", ".join(f"a host of {n} parameters with slots {' '.join(s)}" for n, s in found)


def _metric(updates: list[PPOUpdateCompleted], name: str) -> Curve:
    values = [
        float(value) if (value := u.metrics.get(name)) is not None else math.nan for u in updates
    ]
    return Curve(name.replace("_", " "), values, [0.0] * len(values))


def _plot(rounds: list[int], curves: list[Curve], axis: str) -> str:
    """An SVG of curves over rounds, two standard errors shaded. Lines differ in their dashes."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for curve, dashes in zip(curves, ("-", "--", ":"), strict=False):
        low = [m - 2 * e for m, e in zip(curve.mean, curve.error, strict=True)]
        high = [m + 2 * e for m, e in zip(curve.mean, curve.error, strict=True)]
        (line,) = axes.plot(rounds, curve.mean, dashes, label=curve.label, marker=".")
        axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel(axis)
    axes.legend()
    axes.grid(alpha=0.3)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _first_and_last(
    outcomes: list[EpisodeOutcome],
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The table of the first and the last tenth of the rounds."""
    tenth = math.ceil(len(outcomes) / 10)
    parts = [outcomes[:tenth], outcomes[-tenth:]]

    def cells(field: str, form: str) -> list[str]:
        return [
            format(fmean(v for o in part for v in to_floats(getattr(o, field))), form)
            for part in parts
        ]

    rows = [
        ("accuracy grown (committed)", cells("accuracy", ".3f")),
        ("accuracy of the twin", cells("twin_accuracy", ".3f")),
        ("utility", cells("utility", "+.3f")),
        ("utility of the twin", cells("twin_utility", "+.3f")),
        ("return", cells("episode_return", "+.3f")),
        ("parameters added", cells("added_parameters", ".0f")),
        ("seeds germinated", cells("germinated", ".2f")),
        ("seeds fossilised", cells("fossilised", ".2f")),
        ("seeds pruned", cells("pruned", ".2f")),
        ("rollbacks", cells("rolled_back", ".2f")),
    ]
    return [f"rounds {p[0].round} to {p[-1].round}" for p in parts], rows
