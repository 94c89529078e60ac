"""Several runs side by side, or networks that ``esper.grow`` grows: did it pay, what grew, so far.

A row for each, and below the table the curve and the latest decisions of the one under the cursor.
"""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer

from esper.karn.grown_runs import KINDS, Growth, is_grown
from esper.karn.runs import is_running
from esper.karn.sanctum.log import EventLog
from esper.karn.sanctum.signs import DARK, LIGHT, Palette, count, difference_text, number_text
from esper.karn.sanctum.widgets import Column, Curve, Lines, Plot, RowsTable
from esper.leyline.events import (
    POINTS,
    AnomalyDetected,
    EpisodeOutcome,
    Number,
    TrainingFinished,
    TrainingStarted,
)
from esper.leyline.run_files import EVENTS_LOCK

POLL_SECONDS = 0.5
STORY_LINES = 12
"""Lines of the latest decisions."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is shown of a run.

    Attributes:
        name: of its directory.
        status: a word; empty in a follower's own row before the end, when the lock tells it.
        progress: how far it is.
        figure, twin: the last figure, and that of the twin, as text.
        lead: the one minus the other, in points where the figure is a share; None if unknown.
        parameters: parameters of the network, or parameters added on average.
        curves: over ``positions``, rounds or epochs.
        unit: what the curves show.
        verdict: whether growth paid; empty before the end, and for a policy.
        story: what was decided, the latest last.
    """

    name: str
    status: str
    progress: str
    figure: str
    twin: str
    lead: float | None
    parameters: str
    positions: Sequence[int]
    curves: Sequence[tuple[str, Sequence[Number | None]]]
    unit: str
    verdict: str
    story: Sequence[str]


class Follower:
    """A run that is followed.

    Args:
        folder: its directory.
    """

    def __init__(self, folder: Path):
        self.folder, self.name, self.log = folder, folder.resolve().name, EventLog(folder)
        self.grows = is_grown(folder)
        self._latest: Row | None = None

    def row(self) -> Row:
        """What is known of it now; made anew only where its log has changed."""
        news = self.log.poll()
        while self.log.behind:
            news |= self.log.poll()
        if news or self._latest is None:
            self._latest = self._growth() if self.grows else self._run()
        if self._latest.status:
            return self._latest
        lives = is_running(self.folder, EVENTS_LOCK if self.grows else "lock")
        return replace(self._latest, status="running" if lives else "ended early")

    def _growth(self) -> Row:
        index = self.log.index
        lines = [
            pair
            for kind in KINDS
            if kind in index.lists
            for pair in zip(index.lists[kind].lines, index.lists[kind].events, strict=True)
        ]
        growth = Growth.of(event for _, event in sorted(lines, key=lambda pair: pair[0]))
        start, last, end = growth.start, growth.last, growth.end
        curves = {
            variant if attempt == 1 else f"{variant}, try {attempt}": curve
            for (variant, attempt), curve in growth.curves.items()
        }
        unit = last.unit if last else ""
        scale = POINTS if unit == "accuracy" else 1.0
        ends = {
            variant: scale * float(curve[max(curve)].figure)
            for (variant, _), curve in growth.curves.items()
        }
        if end is not None:
            values = [scale * float(value) for value in end.validation]
            ends = dict(zip(("grown", "twin"), values, strict=False))
        grown, twin = ends.get("grown"), ends.get("twin")
        points = POINTS if unit == "R²" else 1.0
        size = (
            end.parameters[0]
            if end
            else max((e.parameters for c in growth.curves.values() for e in c.values()), default=0)
        )
        story = [f"{name}, epoch {epoch}: {text}" for name, _, epoch, text in growth.decisions()]
        progress = f"{last.variant} {last.epoch}/{start.epochs}" if last and start else "begins"
        positions = sorted({epoch for curve in growth.curves.values() for epoch in curve})
        return Row(
            name=self.name,
            status="finished" if end else "",
            progress=progress,
            figure=number_text(grown, ".4g") if grown is not None else "",
            twin=number_text(twin, ".4g") if twin is not None else "",
            lead=None if grown is None or twin is None else points * (grown - twin),
            parameters=count(size) if start else "",
            positions=positions,
            curves=[
                (name, [scale * float(curve[x].figure) if x in curve else None for x in positions])
                for name, curve in curves.items()
            ],
            unit=f"{unit} on validation{', %' if unit == 'accuracy' else ''}",
            verdict=end.verdict if end else "",
            story=story,
        )

    def _run(self) -> Row:
        index = self.log.index
        starts, outcomes = index.until(TrainingStarted), index.until(EpisodeOutcome)
        ends, start = index.until(TrainingFinished), starts[0] if starts else None
        outcome = ends[-1].status if len(ends) >= len(starts) > 0 else ""
        gains = [fmean(map(float, each.gain or each.validation_gain)) for each in outcomes]
        last = outcomes[-1] if outcomes else None
        return Row(
            name=self.name,
            status=outcome,
            progress=f"round {last.round if last else 0}/{start.rounds}" if start else "begins",
            figure=_percent(last.accuracy) if last else "",
            twin=_percent(last.twin_accuracy) if last else "",
            lead=gains[-1] if gains else None,
            parameters=count(fmean(map(float, last.added_parameters))) if last else "",
            positions=[each.round for each in outcomes],
            curves=[("gain", gains)],
            unit="gain, points",
            verdict="",
            story=[f"round {each.round}: {each.message}" for each in index.until(AnomalyDetected)],
        )


def _percent(shares: Sequence[Number]) -> str:
    return number_text(POINTS * fmean(map(float, shares)), ".1f")


class SideBySide(App[Path]):
    """Shows runs side by side; returns the directory of a run that the user opens.

    Args:
        folders: directories of runs or of grown networks.
        light: dark text on a light background.
    """

    TITLE = "Sanctum"
    CSS_PATH = "sanctum.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "toggle_theme", "theme"),
        Binding("q,ctrl+c,ctrl+q", "quit", "close", key_display="q", priority=True),
    ]

    def __init__(self, folders: Sequence[Path], light: bool = False):
        super().__init__()
        self.runs = [Follower(folder) for folder in folders]
        self.theme = "textual-light" if light else "textual-dark"
        self.header, self.story = Lines(id="header"), Lines(id="side-by-side-story")
        self.table = RowsTable("side-by-side", "no events yet")
        self.plot = Plot("", "side-by-side-curves")
        self.rows: list[Row] = []

    def compose(self) -> ComposeResult:
        yield from (self.header, self.table, self.plot, self.story, Footer())

    @property
    def palette(self) -> Palette:
        """The colours for the current background."""
        return DARK if self.current_theme.dark else LIGHT

    def on_mount(self) -> None:
        """Start following the runs."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.table.styles.height = min(len(self.runs), 12) + 1
        self.table.focus()
        self.run_worker(self._follow(), name="follow")

    async def _follow(self) -> None:
        """Read new events on another thread, so that drawing does not wait."""
        while True:
            await asyncio.to_thread(self._read)
            self.draw()
            await asyncio.sleep(POLL_SECONDS)

    def _read(self) -> None:
        self.rows = [run.row() for run in self.runs]

    def draw(self) -> None:
        """Show what is known now."""
        if not self.rows or not self.table.is_attached:
            return
        palette = self.palette
        states = ", ".join(_states(self.rows))
        head = Text("SANCTUM ", style=palette.accent, no_wrap=True, overflow="ellipsis")
        self.header.show(head.append(states, style="bold"))
        self.table.show(_columns(palette), self.rows, palette.cursor)
        row = self.rows[min(self.table.cursor, len(self.rows) - 1)]
        self.plot.caption = f"{row.name}: {row.unit}"
        styles = (palette.grown, palette.twin, palette.warning, palette.muted)
        self.plot.show(
            row.positions,
            [
                Curve(name, values, styles[number % len(styles)])
                for number, (name, values) in enumerate(row.curves)
            ],
        )
        # The answer first, then the latest: a low terminal cuts off what is below.
        text = Text(f"{row.verdict}\n" if row.verdict else "", style="bold")
        latest = list(row.story)[: -STORY_LINES - 1 : -1]
        self.story.show(text.append("\n".join(latest or ["no decision yet"]), style="not bold"))

    def on_rows_table_cursor_move(self) -> None:
        """Show the run under the cursor."""
        self.draw()

    def on_rows_table_choice(self, event: RowsTable.Choice) -> None:
        """Open the run under the cursor; of a grown network, all is shown here already."""
        run = self.runs[event.row]
        if not run.grows:
            self.exit(run.folder)

    def action_toggle_theme(self) -> None:
        """Switch between the dark and the light theme."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"
        self.draw()


def _states(rows: Sequence[Row]) -> list[str]:
    """How many runs have each status."""
    states = dict.fromkeys(row.status for row in rows)
    return [f"{sum(row.status == state for row in rows)} {state}" for state in states]


def _columns(palette: Palette) -> list[Column[Row]]:
    return [
        Column("run", 18, lambda row: Text(row.name, no_wrap=True, overflow="ellipsis")),
        Column("status", 11, lambda row: row.status),
        Column("progress", 12, lambda row: row.progress),
        Column("figure", 7, lambda row: Text(row.figure, style=palette.grown), right=True),
        Column("twin", 7, lambda row: Text(row.twin, style=palette.twin), right=True),
        Column("gain", 6, lambda row: difference_text(row.lead, "+.1f", palette), right=True),
        Column("size", 9, lambda row: row.parameters, right=True),
    ]
