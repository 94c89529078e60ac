"""Render the page about one run, or several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from esper.karn.grown_runs import is_grown
from esper.karn.report import tables
from esper.karn.report.curves import (
    anomaly_pictures,
    learning_pictures,
    policy_pictures,
    throughput_pictures,
)
from esper.karn.report.drawing import Picture, figure_style
from esper.karn.report.gather import RunData
from esper.karn.report.grown_networks import GrownNetwork, growth_curves
from esper.karn.report.growth_figures import growth_pictures
from esper.karn.report.tables import Table
from esper.leyline.errors import UsageError
from esper.leyline.laboratory import MISSING, find_part
from esper.leyline.phases import track
from esper.leyline.run_files import LADDERS

Ladders = tuple[list[Picture], list[Table], list[str]]
"""Pictures and tables of the evaluations of a run, and why others were refused."""
PICTURES = {
    "Learning": learning_pictures,
    "Growth": growth_pictures,
    "Policy": policy_pictures,
    "Anomalies": anomaly_pictures,
    "Throughput": throughput_pictures,
}
"""The drawings of each section."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its pictures and tables."""

    title: str
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The section's id, for links."""
        return self.title.lower().replace(" ", "-")


def write_page(runs: Sequence[Path], target: Path) -> Path:
    """See ``karn.report.write_report``, which checks that the libraries are installed."""
    if len({run.resolve() for run in runs}) < len(runs):
        raise UsageError("run: the same run is named twice; name each once")
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(f"output: {target} is not a file in an existing directory; name another")
    grown = [run for run in runs if is_grown(run)]
    if grown and len(grown) < len(runs):
        raise UsageError(
            f"run: {grown[0]} is a grown network and others are runs of a policy; one report shows "
            "one kind"
        )
    reading = track(runs, "reading the runs", "runs")
    text = render_growth(list(reading)) if grown else render([RunData(run) for run in reading])
    draft = target.with_name(f".{target.name}.draft")
    try:
        # A path on a command line may contain bytes that are not valid text.
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def render(runs: list[RunData]) -> str:
    """Render the page; return its HTML."""
    _number_labels(runs)
    with figure_style():
        ladders = [_ladders(run) for run in runs]
        sections = _sections(runs, ladders)
    return _html(
        title=_title(runs),
        heads=[
            (
                run.label,
                tables.summary(run),
                "Is it learning?",
                tables.verdict(run),
                tables.tiles(run),
                tables.moment(run.info.started),
            )
            for run in runs
        ],
        notes=[
            note for run, ladder in zip(runs, ladders, strict=True) for note in _notes(run, ladder)
        ],
        sections=sections,
    )


def render_growth(folders: list[Path]) -> str:
    """Render the page about grown networks; return its HTML."""
    networks = [GrownNetwork(folder) for folder in folders]
    with figure_style():
        pictures = growth_curves(networks)
    names = [each.label for each in networks]
    return _html(
        title=f"Did it pay? {', '.join(names) if len(names) < 4 else f'{len(names)} networks'}",
        heads=[
            (each.label, each.summary(), "Did it pay?", each.verdict(), each.tiles(), each.moment())
            for each in networks
        ],
        notes=[note for each in networks for note in each.notes()],
        sections=[
            Section("Did it pay", pictures),
            Section("What grew", [], [table for each in networks for table in each.tables()]),
        ],
    )


def _html(**content: Any) -> str:
    """The page's template with its content."""
    template = files("esper.karn.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return page.from_string(template).render(**content)


def _sections(runs: list[RunData], ladders: list[Ladders]) -> list[Section]:
    several = len(runs) > 1
    by_task = [tables.task_table(run, several) for run in runs]
    by_blueprint = [tables.seed_table(run, several) for run in runs]
    anomalies = tables.anomaly_table(runs)
    settings = tables.settings_table(runs)
    drawings = track(PICTURES.items(), "drawing the report", "sections")
    pictures = {title: draw(runs) for title, draw in drawings}
    learning = Section("Learning", pictures["Learning"], [])
    if any(len(run.rounds) for run in runs):
        learning.tables.extend([tables.final_table(runs), *filter(None, by_task)])
    evaluation = Section(
        "Evaluation",
        [picture for ladder, _, _ in ladders for picture in ladder],
        [table for _, ladder_tables, _ in ladders for table in ladder_tables],
    )
    return [
        *([Section("Differences", [], [settings])] if several else []),
        learning,
        Section("Growth", pictures["Growth"], [t for t in by_blueprint if t]),
        Section("Policy", pictures["Policy"]),
        *([evaluation] if evaluation.pictures else []),
        Section("Anomalies", pictures["Anomalies"], [anomalies] if anomalies else []),
        Section("Throughput", pictures["Throughput"]),
        Section(
            "Configuration", [], [*([] if several else [settings]), tables.fingerprint_table(runs)]
        ),
    ]


def _ladders(run: RunData) -> Ladders:
    # Few runs have evaluations, and what reads them takes PyTorch, so more than a second.
    if not (run.info.path / LADDERS).is_dir():
        return [], [], []
    read = find_part("ladders")
    if read is None:
        return [], [], [f"its evaluations are not shown, because {MISSING}"]
    ladders: Ladders = read(run.info.path, run.label)
    return ladders


def _number_labels(runs: list[RunData]) -> None:
    """Number the labels of runs that share a name."""
    names = [run.label for run in runs]
    for number, run in enumerate(runs, 1):
        if names.count(run.label) > 1:
            run.label = f"{run.label} ({number})"


def _title(runs: list[RunData]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs side by side"
    tasks = runs[0].task_names
    names = ", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"
    return f"{names}: {runs[0].start.policy}"


def _notes(run: RunData, ladders: Ladders) -> list[str]:
    """Warnings above the figures, such as an incomplete run or missing events."""
    so_far = f"after {run.info.rounds_done} of {run.start.rounds} rounds."
    states = {
        "running": f"{run.label} is still running; the page shows it {so_far}",
        "interrupted": f"{run.label} was interrupted {so_far}",
        "failed": f"{run.label} failed {so_far}",
    }
    notes = [states[run.info.status]] if run.info.status in states else []
    if run.failure:
        notes.append(f"{run.label}: {run.failure}")
    if run.dropped_steps:
        notes.append(
            f"{run.label}: telemetry could not keep up; steps dropped: {run.dropped_steps}."
        )
    if run.unreadable:
        notes.append(f"{run.label}: unreadable lines were skipped: {run.unreadable}.")
    notes += [f"{run.label}: {line}." for line in ladders[2]]
    if not len(run.rounds):
        notes.append(f"{run.label} has not completed a round yet.")
    return notes
