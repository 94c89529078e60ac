"""The first page: all environments, whether the policy learns, curves over rounds, events."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import fmean
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from esper.karn.learning_diagnosis import Curve, Verdict, diagnose
from esper.karn.sanctum.formatting import (
    count,
    difference_text,
    harmless,
    number_text,
    sparkline,
    to_float,
)
from esper.karn.sanctum.palette import GLYPHS, Palette, stage_name
from esper.karn.sanctum.plot import Curve as PlotCurve
from esper.karn.sanctum.plot import Plot
from esper.karn.sanctum.rows import FILTERS, SORTS, TROUBLE, Row, Status, arrange, rows
from esper.karn.sanctum.scoreboard_page import PerEventCache, Score, mean
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.widgets import WIDE, Column, Lines, RowsTable, View
from esper.leyline.events import (
    CheckpointSaved,
    EpochCompleted,
    GovernorRollback,
    SeedEvent,
    SeedFossilized,
    SeedGerminated,
    SeedPruned,
)
from esper.leyline.stages import Stage


class Overview(View):
    """The page of all environments."""

    title = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "sort"),
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
        self.side = Vertical(id="overview-side", classes="wide-only")
        self.plot = Plot("validation accuracy of each round", id="overview-accuracy")
        self.feed = Lines(id="overview-feed")
        self.search = Input(placeholder="words: growing, conv_heavy, a number", id="search")

    def compose(self) -> ComposeResult:
        """Yield the widgets of the page."""
        yield self.summary
        yield self.verdict
        with Horizontal():
            with Vertical():
                yield self.table
                yield self.gain
            with self.side:
                yield self.plot
                yield self.feed
        yield self.search

    def draw(self, moment: Moment, palette: Palette) -> None:
        """Draw all environments at a moment."""
        every, means = rows(moment), [self._mean(outcome) for outcome in moment.outcomes]
        self.rows = arrange(every, self.sort, self.backwards, self.keep, self.words)
        summary = _totals(every, palette, words=self.app.screen.size.width >= WIDE)
        summary.append("\n").append_text(self._arrangement(len(every), palette))
        summary.append_text(_last_gain(means[-12:], palette))
        self.summary.show(summary)
        self._show_verdict(moment, means, palette)
        self._show_table(moment, palette)
        self._show_gain(means, palette)
        if self.side.display:
            self._show_accuracy(means, palette)
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
        wide = self.table.size.width >= 92
        several = moment.start is not None and len(moment.start.tasks) > 1
        columns: list[Column[Row]] = [
            Column("env", 4, lambda row: str(row.environment), right=True),
            Column("val. acc", 8, lambda row: number_text(row.accuracy), right=True),
            Column("lead", 7, lambda row: difference_text(row.lead, "+.3f", palette), right=True),
            Column(
                "slots",
                max(5, min(2 * slots - 1, 39)),
                lambda row: slot_glyphs(row.stages, palette),
            ),
            Column("last op", 12, lambda row: _last_op(row, palette)),
            Column("reward", 8, lambda row: number_text(row.reward, "+.3f"), right=True),
            Column("added", 7, lambda row: count(row.added_parameters), right=True),
            Column("status", 13, lambda row: _status(row, palette)),
        ]
        if several:
            columns.append(Column("task", 20, lambda row: row.task or "?"))
        if wide:
            steps = moment.episode(moment.round)[-24:]
            columns.append(Column("this episode", 24, lambda row: _curve(row, steps, palette)))
        self.table.show(columns, self.rows, palette.cursor)

    def _show_verdict(self, moment: Moment, means: Sequence[Score], palette: Palette) -> None:
        """Show whether the policy is learning, which is computed once per round."""
        verdict = self._verdict(moment, means) if means else None
        if verdict is not None:
            good = {"learning": palette.good, "learned": palette.good, "too early": palette.muted}
            text = Text(verdict.text, style=good.get(verdict.state, palette.bad))
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

    def _show_gain(self, means: Sequence[Score], palette: Palette) -> None:
        self.gain.display = bool(means)
        validation = [score.validation_gain for score in means]
        curves = [PlotCurve("val. difference", validation, palette.twin, "·")]
        if _has_test(means):
            curves.append(PlotCurve("gain (test)", [score.gain for score in means], palette.grown))
        self.gain.show([float(score.round) for score in means], curves)

    def _show_accuracy(self, means: Sequence[Score], palette: Palette) -> None:
        twin = PlotCurve("twin", [score.twin for score in means], palette.twin, "·")
        grown = PlotCurve("grown", [score.accuracy for score in means], palette.grown)
        self.plot.show([float(score.round) for score in means], [twin, grown])

    def action_sort(self, by: int) -> None:
        """Sort by the next column."""
        names = list(SORTS)
        self.sort_by(names[(names.index(self.sort) + by) % len(names)])

    def sort_by(self, name: str) -> None:
        """Sort by a column; sorting by the same column again reverses the order."""
        self.backwards = name == self.sort and not self.backwards
        self.sort = name
        self.show_again()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.backwards = not self.backwards
        self.show_again()

    def action_filter(self) -> None:
        """Apply the next filter."""
        names = list(FILTERS)
        self.keep = names[(names.index(self.keep) + 1) % len(names)]
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


def _totals(every: list[Row], palette: Palette, words: bool) -> Text:
    """Means over environments, and the number of slots in each stage."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if not every:
        return text.append("no environment step yet", style=palette.muted)
    text.append("validation accuracy ", style=palette.muted)
    text.append(number_text(fmean(row.accuracy for row in every)), style=f"bold {palette.grown}")
    text.append("  twin ", style=palette.muted)
    text.append(number_text(fmean(row.twin for row in every)), style=palette.twin)
    text.append("  lead ", style=palette.muted)
    text.append_text(difference_text(fmean(row.lead for row in every), "+.3f", palette))
    stages = Counter(stage for row in every for stage in row.stages)
    for stage in GLYPHS:
        if stages[stage] and stage:
            text.append("  ")
            text.append(f"{GLYPHS[stage]} {stages[stage]}", style=palette.stage(stage))
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
    text = Text()
    if not means:
        return text
    last = means[-1]
    text.append(f"  round {last.round}: gain ", style=palette.muted)
    text.append_text(difference_text(last.gain, "+.1f", palette))
    text.append("  val. difference ", style=palette.muted)
    text.append_text(difference_text(last.validation_gain, "+.1f", palette))
    return text.append(f" {sparkline([score.rank for score in means], 12)}", style=palette.grown)


def slot_glyphs(stages: list[int], palette: Palette) -> Text:
    """Return the glyph of each slot's stage."""
    text = Text()
    for i, stage in enumerate(stages):
        text.append(" " if i else "").append(GLYPHS.get(stage, "?"), style=palette.stage(stage))
    return text


def _last_op(row: Row, palette: Palette) -> Text:
    done = "" if not row.op or row.op == "wait" else (" ✓" if row.success else " ✗")
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
    lines_by_time: list[tuple[float, Text]] = []
    for kind, stage, word in _SEEDS:
        for event in islice(reversed(moment.events(kind)), lines):
            lines_by_time += [
                (event.time, line) for line in _seeds(moment, event, stage, word, palette)
            ]
    for rollback in islice(reversed(moment.events(GovernorRollback)), lines):
        names = " ".join(map(str, rollback.environment))
        line = Text(f"{_when(rollback)} env {names} ↩ rolled back", style=palette.bad)
        lines_by_time.append((rollback.time, line))
    for checkpoint in islice(reversed(moment.events(CheckpointSaved)), lines):
        line = Text(f"r{checkpoint.round:<9} ⇩ checkpoint", style=palette.muted)
        lines_by_time.append((checkpoint.time, line))
    lines_by_time.sort(key=lambda item: -item[0])
    return Text("\n", no_wrap=True, overflow="ellipsis").join(t for _, t in lines_by_time[:lines])


def _seeds(
    moment: Moment, event: SeedEvent, stage: Stage, word: str, palette: Palette
) -> Iterator[Text]:
    for environment, slot, blueprint in zip(
        event.environment, event.slot, event.blueprint, strict=True
    ):
        line = Text(f"{_when(event)} env {environment:<3} ")
        line.append(f"{GLYPHS[stage]} {word}", style=palette.stage(stage))
        name = moment.slot_names(environment, slot + 1, event.round)[slot]
        yield line.append(f" {blueprint} in {name}")


def _when(event: SeedEvent | GovernorRollback) -> str:
    return f"r{event.round} s{event.step}".ljust(10)
