"""The fifth page: the episodes and rounds with the largest gain."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from math import isfinite
from statistics import fmean
from typing import Generic, TypeVar

from textual.app import ComposeResult
from textual.containers import Horizontal

from esper.karn.sanctum.formatting import count, difference_text, number_text
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.widgets import Column, RowsTable, View
from esper.leyline.events import EpisodeOutcome, Event, to_floats

E = TypeVar("E", bound=Event)
T = TypeVar("T")


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


def episodes(outcome: EpisodeOutcome) -> list[Score]:
    """Return the best episodes of a round; those whose gain is not finite are left out."""
    gains, validation_gains = outcome.gain, outcome.validation_gain
    scores = [
        Score(
            outcome.round,
            i,
            outcome.task[i],
            gains[i] if gains else None,
            validation_gains[i],
            float(outcome.accuracy[i]),
            float(outcome.twin_accuracy[i]),
            float(outcome.episode_return[i]),
            outcome.added_parameters[i],
            outcome.fossilised[i],
        )
        for i in range(len(outcome.accuracy))
    ]
    return nlargest(MAX_SCORES, (s for s in scores if isfinite(s.rank)), key=lambda s: s.rank)


def mean(outcome: EpisodeOutcome) -> Score:
    """Return the mean over a round's episodes."""
    return Score(
        outcome.round,
        None,
        " ".join(dict.fromkeys(outcome.task)),
        fmean(outcome.gain) if outcome.gain else None,
        fmean(outcome.validation_gain),
        fmean(to_floats(outcome.accuracy)),
        fmean(to_floats(outcome.twin_accuracy)),
        fmean(to_floats(outcome.episode_return)),
        fmean(outcome.added_parameters),
        fmean(outcome.fossilised),
    )


class Scoreboard(View):
    """The page of the best episodes and rounds."""

    title = "scoreboard"

    def __init__(self) -> None:
        super().__init__()
        self._episodes = PerEventCache(episodes)
        self._mean = PerEventCache(mean)
        self.best: list[Score] = []
        self.rounds: list[Score] = []
        self.episode_table = RowsTable("best-episodes", "no round is over yet")
        self.round_table = RowsTable("best-rounds", "no round is over yet")

    def compose(self) -> ComposeResult:
        """Yield the widgets of the page."""
        with Horizontal():
            yield self.episode_table
            yield self.round_table

    def draw(self, moment: Moment, palette: Palette) -> None:
        """Draw the best episodes and rounds up to a moment."""
        every = (score for outcome in moment.outcomes for score in self._episodes(outcome))
        self.best = nlargest(MAX_SCORES, every, key=lambda s: s.rank)
        means = [
            score for outcome in moment.outcomes if isfinite((score := self._mean(outcome)).rank)
        ]
        self.rounds = nlargest(MAX_SCORES, means, key=lambda s: s.rank)
        front: list[Column[Score]] = [
            Column("gain", 6, lambda s: difference_text(s.gain, "+.1f", palette), True),
            Column(
                "on val.",
                7,
                lambda score: difference_text(score.validation_gain, "+.1f", palette),
                True,
            ),
            Column("round", 5, lambda s: str(s.round), True),
        ]
        self.episode_table.show([*front, *_EPISODE, *_back(".0f")], self.best, palette.cursor)
        self.round_table.show([*front, *_back(".2f")], self.rounds, palette.cursor)

    def on_rows_table_choice(self, event: RowsTable.Choice) -> None:
        """Open the end of the chosen episode or round."""
        score = (self.best if event.table is self.episode_table else self.rounds)[event.row]
        self.post_message(self.Choice(score.round, score.environment))


_EPISODE: tuple[Column[Score], ...] = (
    Column("env", 4, lambda score: str(score.environment), True),
    Column("task", 14, lambda score: score.task),
)


def _back(form: str) -> tuple[Column[Score], ...]:
    """The last columns of both tables; ``form`` is the number format of fossilised seeds."""
    return (
        Column("val. acc", 8, lambda score: number_text(score.accuracy), True),
        Column("twin", 5, lambda score: number_text(score.twin), True),
        Column("added", 6, lambda score: count(score.added_parameters), True),
        Column("kept", 4, lambda score: format(score.fossilised, form), True),
        Column("return", 8, lambda score: number_text(score.episode_return, "+.3f"), True),
    )
