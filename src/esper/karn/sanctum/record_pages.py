"""The last two pages: anomalies and rollbacks, and the episodes and rounds of largest gain."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import isfinite
from statistics import fmean
from typing import Generic, TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal

from esper.karn.sanctum.signs import (
    Palette,
    compact,
    count,
    count_text,
    difference_text,
    number_text,
)
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.widgets import WIDE, Column, Lines, RowsTable, View
from esper.leyline.events import (
    AnomalyDetected,
    EpisodeOutcome,
    Event,
    GovernorRollback,
    Number,
    TelemetryDropped,
    to_floats,
)

E = TypeVar("E", bound=Event)
T = TypeVar("T")

Trouble = tuple[AnomalyDetected, int | None]
"""An anomaly, and the environment of a rollback, which counts as an anomaly."""


def troubles(moment: Moment) -> list[Trouble]:
    """Return all anomalies and rollbacks up to ``moment``, newest first."""
    entries: list[Trouble] = [(event, None) for event in moment.anomalies]
    for event in moment.events(GovernorRollback):
        for environment, reason in zip(event.environment, event.reason, strict=True):
            anomaly = AnomalyDetected(
                time=event.time,
                round=event.round,
                step=event.step,
                kind="rollback",
                message=f"environment {environment} was rolled back: {_words(reason)}",
            )
            entries.append((anomaly, environment))
    return sorted(entries, key=lambda trouble: -trouble[0].time)


def _words(name: str) -> str:
    return name.lower().replace("_", " ").removesuffix(" detected")


def summary(moment: Moment, palette: Palette) -> Text:
    """Return one line that counts anomalies by kind; empty where there are none."""
    anomalies, rollbacks = moment.anomalies, moment.events(GovernorRollback)
    counts = Counter(_words(event.kind) for event in anomalies)
    if rollbacks:
        counts["rollback"] = sum(len(event.environment) for event in rollbacks)
    text = Text(no_wrap=True, overflow="ellipsis")
    if not counts:
        return text
    last = max([*anomalies, *rollbacks], key=lambda event: event.time)
    number = count_text(sum(counts.values()), "anomaly", "anomalies")
    text.append(f"▲ {number}", style=palette.bad)
    text.append(f", the last in round {last.round}: ")
    return text.append(", ".join(f"{kind} {n}x" for kind, n in counts.most_common()))


class Anomalies(View):
    """The page of anomalies and rollbacks."""

    title = "anomalies"

    def __init__(self) -> None:
        super().__init__()
        self.troubles: list[Trouble] = []
        self.summary = Lines(id="anomalies-summary")
        self.table = RowsTable("anomaly-table", "● no anomalies so far")

    def compose(self) -> ComposeResult:
        yield from (self.summary, self.table)

    def draw(self, moment: Moment, palette: Palette) -> None:
        self.troubles = troubles(moment)
        self.summary.show(_summary(moment, palette))
        wide = self.app.screen.size.width >= WIDE
        columns = _columns(wide, self.size.width, palette)
        self.table.show(columns, self.troubles, palette.cursor)

    def on_rows_table_choice(self, event: RowsTable.Choice) -> None:
        """Open the round and the environment of the chosen anomaly."""
        anomaly, environment = self.troubles[event.row]
        self.post_message(self.Choice(anomaly.round, environment))


def _summary(moment: Moment, palette: Palette) -> Text:
    """One line that counts anomalies, unreadable lines and steps that were not recorded."""
    index = moment.index
    drops = moment.latest(TelemetryDropped)
    parts = [count_text(len(moment.anomalies), "anomaly", "anomalies")]
    if index.corrupt:
        parts.append(f"{count_text(index.corrupt, 'corrupt line', 'corrupt lines')} skipped")
    if index.unknown:
        parts.append(f"{count_text(index.unknown, 'line', 'lines')} of an unknown kind skipped")
    if moment.log.cut_off and moment.line is None:
        parts.append("the last line is incomplete")
    if drops is not None:
        steps = count_text(drops.total, "step", "steps")
        parts.append(f"{steps} not recorded: telemetry could not keep up")
    return Text(" · ".join(parts), style=palette.muted, no_wrap=True, overflow="ellipsis")


def _columns(wide: bool, width: int, palette: Palette) -> list[Column[Trouble]]:
    def step(trouble: Trouble) -> str:
        return "" if trouble[0].step is None else str(trouble[0].step)

    def value(trouble: Trouble) -> str:
        """The measured value; ``missing`` where the update has no value of the metric."""
        anomaly = trouble[0]
        is_absent = anomaly.metric is None and anomaly.value is None
        return "" if is_absent else compact(anomaly.value)

    def bound(trouble: Trouble) -> str:
        return "" if trouble[0].threshold is None else compact(trouble[0].threshold)

    columns: list[Column[Trouble]] = [
        Column("round", 5, lambda trouble: str(trouble[0].round), right=True),
        Column("step", 4, step, right=True),
        Column("kind", 21, lambda trouble: Text(f"▲ {_words(trouble[0].kind)}", palette.bad)),
    ]
    if wide:
        columns += [Column("value", 9, value, True), Column("bound", 9, bound, True)]
    room = max(20, width - (54 if wide else 34))
    return [*columns, Column("message", room, lambda trouble: trouble[0].message)]


class PerEventCache(Generic[E, T]):
    """Wraps a function of an event so that it is called once per event.

    Sanctum redraws up to ten times per second, and a run may have ten thousand rounds whose
    outcomes no longer change.
    """

    def __init__(self, function: Callable[[E], T]):
        self.function = function
        # Keeping a reference to the event prevents another object from reusing its id.
        self._values: dict[int, tuple[E, T]] = {}

    def __call__(self, event: E) -> T:
        entry = self._values.get(id(event))
        if entry is None:
            entry = self._values[id(event)] = event, self.function(event)
        return entry[1]


MAX_SCORES = 100
"""Maximum number of entries in each table."""


@dataclass(frozen=True, slots=True)
class Score:
    """Outcome of one environment's episode, or its mean over the environments of a round.

    Attributes:
        round: number of the round.
        environment: number of the environment; None for a mean.
        task: the task, or the tasks.
        gain: test utility above the twin's, in points; None if the run has no test scores.
        validation_gain: the same on the validation split.
        accuracy, twin: committed validation accuracy of host and twin.
        episode_return: sum of the rewards.
        added_parameters: parameters added.
        fossilised: seeds fossilised.
    """

    round: int
    environment: int | None
    task: str
    gain: float | None
    validation_gain: float
    accuracy: float
    twin: float
    episode_return: float
    added_parameters: float
    fossilised: float

    @property
    def rank(self) -> float:
        """What scores are sorted by: the gain, else the validation difference."""
        return self.validation_gain if self.gain is None else self.gain


def _score(
    outcome: EpisodeOutcome,
    environment: int | None,
    task: str,
    value: Callable[[Sequence[Number]], float],
) -> Score:
    """The score of the values that ``value`` makes of one number per environment."""
    return Score(
        outcome.round,
        environment,
        task,
        value(outcome.gain) if outcome.gain else None,
        value(outcome.validation_gain),
        value(outcome.accuracy),
        value(outcome.twin_accuracy),
        value(outcome.episode_return),
        value(outcome.added_parameters),
        value(outcome.fossilised),
    )


def episodes(outcome: EpisodeOutcome) -> list[Score]:
    """Return the best episodes of a round; those whose gain is not finite are left out."""
    scores = [
        _score(outcome, i, task, lambda values, i=i: float(values[i]))  # type: ignore[misc]
        for i, task in enumerate(outcome.task)
    ]
    return nlargest(MAX_SCORES, (s for s in scores if isfinite(s.rank)), key=lambda s: s.rank)


def mean(outcome: EpisodeOutcome) -> Score:
    """Return the mean over a round's episodes."""
    tasks = " ".join(dict.fromkeys(outcome.task))
    return _score(outcome, None, tasks, lambda values: fmean(to_floats(values)))


class Scoreboard(View):
    """The page of the best episodes and rounds."""

    title = "scoreboard"

    def __init__(self) -> None:
        super().__init__()
        self._episodes, self._mean = PerEventCache(episodes), PerEventCache(mean)
        self.best: list[Score] = []
        self.rounds: list[Score] = []
        self.episode_table = RowsTable("best-episodes", "no round is over yet")
        self.round_table = RowsTable("best-rounds", "no round is over yet")

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield from (self.episode_table, self.round_table)

    def draw(self, moment: Moment, palette: Palette) -> None:
        every = (score for outcome in moment.outcomes for score in self._episodes(outcome))
        self.best = nlargest(MAX_SCORES, every, key=lambda s: s.rank)
        means = (score for score in map(self._mean, moment.outcomes) if isfinite(score.rank))
        self.rounds = nlargest(MAX_SCORES, means, key=lambda s: s.rank)

        def points(value: float | None) -> Text:
            return difference_text(value, "+.1f", palette)

        front: list[Column[Score]] = [
            Column("gain", 6, lambda score: points(score.gain), True),
            Column("on val.", 7, lambda score: points(score.validation_gain), True),
            Column("round", 5, lambda score: str(score.round), True),
        ]
        episode: list[Column[Score]] = [
            Column("env", 4, lambda score: str(score.environment), True),
            Column("task", 14, lambda score: score.task),
        ]
        back: list[Column[Score]] = [
            Column("val. acc", 8, lambda score: number_text(score.accuracy), True),
            Column("twin", 5, lambda score: number_text(score.twin), True),
            Column("added", 6, lambda score: count(score.added_parameters), True),
            Column("kept", 4, _fossil_count, True),
            Column("return", 8, lambda score: number_text(score.episode_return, "+.3f"), True),
        ]
        self.episode_table.show([*front, *episode, *back], self.best, palette.cursor)
        self.round_table.show([*front, *back], self.rounds, palette.cursor)

    def on_rows_table_choice(self, event: RowsTable.Choice) -> None:
        """Open the end of the chosen episode or round."""
        score = (self.best if event.table is self.episode_table else self.rounds)[event.row]
        self.post_message(self.Choice(score.round, score.environment))


def _fossil_count(score: Score) -> str:
    return format(score.fossilised, ".2f" if score.environment is None else ".0f")
