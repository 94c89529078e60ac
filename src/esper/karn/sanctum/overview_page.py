"""The first page: all environments, whether the policy learns, curves over rounds, events."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from statistics import fmean
from typing import ClassVar, TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from esper.karn.learning_diagnosis import Curve, Verdict, diagnose
from esper.karn.sanctum.record_pages import PerEventCache, Score, mean
from esper.karn.sanctum.rows import FILTERS, SORTS, TROUBLE, Row, Status, arrange, rows
from esper.karn.sanctum.signs import (
    GLYPHS,
    Palette,
    count,
    difference_text,
    harmless,
    number_text,
    sparkline,
    stage_name,
    to_float,
)
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.widgets import WIDE, Column, Lines, Plot, RowsTable, View
from esper.karn.sanctum.widgets import Curve as PlotCurve
from esper.leyline.events import (
    CheckpointSaved,
    EpochCompleted,
    Event,
    GovernorRollback,
    SeedEvent,
    SeedFossilized,
    SeedGerminated,
    SeedPruned,
)
from esper.leyline.stages import Stage

E = TypeVar("E", bound=Event)


class Overview(View):
    """The page of all environments."""

    title = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse", show=False),
        Binding("f", "filter", "filter"),
        Binding("slash", "search", "search", key_display="/"),
        Binding("escape", "clear_search", "clear", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.sort, self.backwards, self.keep, self.words = "env", False, "all", ""
        self.rows: list[Row] = []
        self._mean = PerEventCache(mean)
        self._shown_verdict = Text()
        self._verdict_of_round: tuple[tuple[int, int, float] | None, Verdict | None] = (None, None)
        # Kept as attributes: while Sanctum is closing, a query may not find them.
        self.summary = Lines(id="overview-summary")
        self.verdict = Static(id="overview-verdict")
        self.table = RowsTable("environments", "no environment matches")
        self.gain = Plot("points above the twin in each round", id="overview-gain")
        self.side = Vertical(id="overview-side")
        self.plot = Plot("validation accuracy of each round", id="overview-accuracy")
        self.feed = Lines(id="overview-feed")
        self.search = Input(placeholder="words: growing, conv_heavy, a number", id="search")

    def compose(self) -> ComposeResult:
        yield from (self.summary, self.verdict)
        with Horizontal():
            with Vertical():
                yield from (self.table, self.gain)
            with self.side:
                yield from (self.plot, self.feed)
        yield self.search

    def draw(self, moment: Moment, palette: Palette) -> None:
        every, means = rows(moment), [self._mean(outcome) for outcome in moment.outcomes]
        self.rows = arrange(every, self.sort, self.backwards, self.keep, self.words)
        summary = _totals(every, palette, words=self.app.screen.size.width >= WIDE)
        summary.append("\n").append_text(self._arrangement(len(every), palette))
        summary.append_text(_last_gain(means[-12:], palette))
        self.summary.show(summary)
        self._show_verdict(moment, means, palette)
        self._show_table(moment, palette)
        self._show_curves(means, palette)
        self.feed.show(feed(moment, max(1, self.feed.size.height), palette))

    def _arrangement(self, total: int, palette: Palette) -> Text:
        direction = "▼" if SORTS[self.sort][1] != self.backwards else "▲"
        text = Text(f"sorted by {self.sort} {direction}", style=palette.muted, no_wrap=True)
        if self.keep != "all" or self.words:
            words = f" with “{self.words}”" if self.words else ""
            text.append(f"  showing {self.keep}{words}: {len(self.rows)} of {total}")
        return text

    def _show_table(self, moment: Moment, palette: Palette) -> None:
        slots = max((len(row.stages) for row in self.rows), default=0)
        glyphs = max(5, min(2 * slots - 1, 39))
        columns: list[Column[Row]] = [
            Column("env", 4, lambda row: str(row.environment), right=True),
            Column("val. acc", 8, lambda row: number_text(row.accuracy), right=True),
            Column("lead", 7, lambda row: difference_text(row.lead, "+.3f", palette), right=True),
            Column("slots", glyphs, lambda row: slot_glyphs(row.stages, palette)),
            Column("last op", 12, lambda row: _last_op(row, palette)),
            Column("reward", 8, lambda row: number_text(row.reward, "+.3f"), right=True),
            Column("added", 7, lambda row: count(row.added_parameters), right=True),
            Column("status", 13, lambda row: _status(row, palette)),
        ]
        if moment.start is not None and len(moment.start.tasks) > 1:
            columns.append(Column("task", 20, lambda row: row.task or "?"))
        if self.table.size.width >= 92:
            steps = moment.episode(moment.round)[-24:]
            columns.append(Column("this episode", 24, lambda row: _curve(row, steps, palette)))
        self.table.show(columns, self.rows, palette.cursor)

    def _show_verdict(self, moment: Moment, means: Sequence[Score], palette: Palette) -> None:
        """Show whether the policy is learning, which is computed once per round."""
        verdict = self._verdict(moment, means) if means else None
        if verdict is not None:
            colours = {"learning": palette.good, "learned": palette.good}
            colours |= dict.fromkeys(("too early", "learned to grow nothing"), palette.muted)
            text = Text(verdict.text, style=colours.get(verdict.state, palette.bad))
        elif means:
            policy = moment.start.policy if moment.start else "the policy"
            text = Text(f"{policy} does not learn", style=palette.muted)
        else:
            text = Text("no round is over yet", style=palette.muted)
        if text != self._shown_verdict:
            # Its lines depend on the width, so the page is laid out again.
            self._shown_verdict = text
            self.verdict.update(harmless(text.copy()))

    def _verdict(self, moment: Moment, means: Sequence[Score]) -> Verdict | None:
        key = len(means), len(moment.updates), moment.outcomes[-1].time
        if key != self._verdict_of_round[0]:
            self._verdict_of_round = key, _diagnosis(moment, means)
        return self._verdict_of_round[1]

    def _show_curves(self, means: Sequence[Score], palette: Palette) -> None:
        rounds = [float(score.round) for score in means]
        self.gain.display = bool(means)
        validation = [score.validation_gain for score in means]
        curves = [PlotCurve("val. difference", validation, palette.twin, "·")]
        if _has_test(means):
            curves.append(PlotCurve("gain (test)", [score.gain for score in means], palette.grown))
        self.gain.show(rounds, curves)
        if self.plot.display:
            twin = PlotCurve("twin", [score.twin for score in means], palette.twin, "·")
            grown = PlotCurve("grown", [score.accuracy for score in means], palette.grown)
            self.plot.show(rounds, [twin, grown])

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.sort_by(_next(SORTS, self.sort))

    def sort_by(self, name: str) -> None:
        """Sort by a column; sorting by the same column again reverses the order."""
        self.backwards = name == self.sort and not self.backwards
        self.sort = name
        self.show_again()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.sort_by(self.sort)

    def action_filter(self) -> None:
        """Apply the next filter."""
        self.keep = _next(FILTERS, self.keep)
        self.show_again()

    def action_search(self) -> None:
        """Open the search field; rows must contain all words typed."""
        self.search.display = True
        self.search.focus()

    def action_clear_search(self) -> None:
        """Clear search and filter."""
        self.search.value, self.words, self.keep = "", "", "all"
        self.search.display = False
        self.table.focus()
        self.show_again()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search while words are typed."""
        self.words = event.value
        self.show_again()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close the search field and keep the search."""
        event.input.display = False
        self.table.focus()

    def on_rows_table_heading_click(self, event: RowsTable.HeadingClick) -> None:
        """Sort by the clicked column."""
        if event.title in SORTS:
            self.sort_by(event.title)

    def on_rows_table_choice(self, event: RowsTable.Choice) -> None:
        """Open the chosen environment."""
        self.post_message(self.Choice(None, self.rows[event.row].environment))


def _next(names: Iterable[str], name: str) -> str:
    """The name after ``name``, and after the last the first."""
    every = list(names)
    return every[(every.index(name) + 1) % len(every)]


def _totals(every: list[Row], palette: Palette, words: bool) -> Text:
    """Means over environments, and the number of slots in each stage."""
    if not every:
        return Text("no environment step yet", palette.muted, no_wrap=True, overflow="ellipsis")
    text = Text.assemble(
        ("validation accuracy ", palette.muted),
        (number_text(fmean(row.accuracy for row in every)), f"bold {palette.grown}"),
        ("  twin ", palette.muted),
        (number_text(fmean(row.twin for row in every)), palette.twin),
        ("  lead ", palette.muted),
        difference_text(fmean(row.lead for row in every), "+.3f", palette),
        no_wrap=True,
        overflow="ellipsis",
    )
    stages = Counter(stage for row in every for stage in row.stages)
    for stage, glyph in GLYPHS.items():
        if stages[stage] and stage:
            text.append("  ").append(f"{glyph} {stages[stage]}", style=palette.stage(stage))
            if words:
                text.append(f" {stage_name(stage)}", style=palette.muted)
    return text


def _has_test(means: Sequence[Score]) -> bool:
    """Whether any round has a gain."""
    return any(score.gain is not None and math.isfinite(score.gain) for score in means)


def _diagnosis(moment: Moment, means: Sequence[Score]) -> Verdict | None:
    has_test = _has_test(means)
    values = [score.gain if has_test else score.validation_gain for score in means]
    curve = Curve(
        "gain" if has_test else "validation difference",
        " points",
        [math.nan if value is None else value for value in values],
    )
    updates = [
        {name: to_float(value) for name, value in event.metrics.items()} for event in moment.updates
    ]
    return diagnose(curve, updates, [score.fossilised for score in means])


def _last_gain(means: Sequence[Score], palette: Palette) -> Text:
    """Mean gain of the last round, beside validation, and a sparkline of the rounds."""
    if not means:
        return Text()
    last, style = means[-1], palette.muted
    return Text.assemble(
        (f"  round {last.round}: gain ", style),
        difference_text(last.gain, "+.1f", palette),
        ("  val. difference ", style),
        difference_text(last.validation_gain, "+.1f", palette),
        (f" {sparkline([score.rank for score in means], 12)}", palette.grown),
    )


def slot_glyphs(stages: Sequence[int], palette: Palette) -> Text:
    """Return the glyph of each slot's stage."""
    text = Text()
    for i, stage in enumerate(stages):
        text.append(" " if i else "").append(GLYPHS.get(stage, "?"), style=palette.stage(stage))
    return text


def _last_op(row: Row, palette: Palette) -> Text:
    done = "" if row.op in ("", "wait") else (" ✓" if row.success else " ✗")
    return Text(row.op + done, style=palette.muted if row.op == "wait" else "")


def _status(row: Row, palette: Palette) -> Text:
    style = palette.bad if row.status in TROUBLE else ""
    return Text(row.status.value, style=palette.muted if row.status is Status.PLAIN else style)


def _curve(row: Row, steps: Sequence[EpochCompleted], palette: Palette) -> Text:
    accuracies = [step.validation_accuracy[row.environment] for step in steps]
    return Text(sparkline(accuracies, 24), style=palette.grown)


_SEEDS: tuple[tuple[type[SeedEvent], Stage, str], ...] = (
    (SeedGerminated, Stage.GERMINATED, "germinated"),
    (SeedFossilized, Stage.FOSSILISED, "fossilised"),
    (SeedPruned, Stage.PRUNED, "pruned"),
)


def feed(moment: Moment, lines: int, palette: Palette) -> Text:
    """Return the latest ``lines`` events as text, one per line."""

    def latest(kind: type[E]) -> Iterator[E]:
        return islice(reversed(moment.events(kind)), lines)

    entries: list[tuple[float, Text]] = []
    for kind, stage, word in _SEEDS:
        for event in latest(kind):
            seeds = zip(event.environment, event.slot, event.blueprint, strict=True)
            for environment, slot, blueprint in seeds:
                line = Text(f"{_when(event)} env {environment:<3} ")
                line.append(f"{GLYPHS[stage]} {word}", style=palette.stage(stage))
                name = moment.slot_names(environment, slot + 1, event.round)[slot]
                entries.append((event.time, line.append(f" {blueprint} in {name}")))
    for rollback in latest(GovernorRollback):
        names = " ".join(map(str, rollback.environment))
        line = Text(f"{_when(rollback)} env {names} ↩ rolled back", style=palette.bad)
        entries.append((rollback.time, line))
    for checkpoint in latest(CheckpointSaved):
        line = Text(f"r{checkpoint.round:<9} ⇩ checkpoint", style=palette.muted)
        entries.append((checkpoint.time, line))
    entries.sort(key=lambda entry: -entry[0])
    return Text("\n", no_wrap=True, overflow="ellipsis").join(t for _, t in entries[:lines])


def _when(event: SeedEvent | GovernorRollback) -> str:
    return f"r{event.round} s{event.step}".ljust(10)
