"""The fifth page: the episodes and rounds in which growing gained most."""

from dataclasses import dataclass
from heapq import nlargest
from math import isfinite
from statistics import fmean

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message

from esper.karn.sanctum.formatting import count, written
from esper.karn.sanctum.memo import OfEach
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.table import Cell, Column, RowsTable
from esper.karn.sanctum.view import View
from esper.leyline.events import EpisodeOutcome, to_floats

SHOWN = 100
"""Places of the board."""


@dataclass(frozen=True, slots=True)
class Score:
    """An episode of one environment, or the mean of a round's."""

    round: int
    environment: int | None
    task: str
    accuracy: float
    twin: float
    episode_return: float
    added: float
    fossilised: float

    @property
    def gain(self) -> float:
        """Committed accuracy above the twin's."""
        return self.accuracy - self.twin


def episodes(outcome: EpisodeOutcome) -> list[Score]:
    """The episodes of a round, those left out whose accuracy is not finite."""
    scores = [
        Score(
            outcome.round,
            i,
            outcome.task[i],
            float(outcome.accuracy[i]),
            float(outcome.twin_accuracy[i]),
            float(outcome.episode_return[i]),
            outcome.added_parameters[i],
            outcome.fossilised[i],
        )
        for i in range(len(outcome.accuracy))
    ]
    return nlargest(SHOWN, (s for s in scores if isfinite(s.gain)), key=lambda s: s.gain)


def mean(outcome: EpisodeOutcome) -> Score:
    """The mean of a round's episodes."""
    return Score(
        outcome.round,
        None,
        " ".join(dict.fromkeys(outcome.task)),
        fmean(to_floats(outcome.accuracy)),
        fmean(to_floats(outcome.twin_accuracy)),
        fmean(to_floats(outcome.episode_return)),
        fmean(outcome.added_parameters),
        fmean(outcome.fossilised),
    )


class Scoreboard(View):
    """See the module."""

    title = "scoreboard"

    class EpisodeChosen(Message):
        """An episode was opened."""

        def __init__(self, score: Score):
            super().__init__()
            self.score = score

    def __init__(self) -> None:
        super().__init__(id="scoreboard")
        self._episodes = OfEach(episodes)
        self._mean = OfEach(mean)
        self.best: list[Score] = []
        self.rounds: list[Score] = []
        self.episode_table = RowsTable("best-episodes", "no round is over yet")
        self.round_table = RowsTable("best-rounds", "no round is over yet")

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield self.episode_table
            yield self.round_table

    def show(self, moment: Moment, palette: Palette) -> None:
        every = (score for outcome in moment.outcomes for score in self._episodes(outcome))
        self.best = nlargest(SHOWN, every, key=lambda s: s.gain)
        means = [
            score for outcome in moment.outcomes if isfinite((score := self._mean(outcome)).gain)
        ]
        self.rounds = nlargest(SHOWN, means, key=lambda s: s.gain)
        for table, scores, extra in (
            (self.episode_table, self.best, [Column("env", 4, True), Column("task", 14)]),
            (self.round_table, self.rounds, []),
        ):
            table.show(
                [
                    Column("gain", 7, True),
                    Column("round", 6, True),
                    *extra,
                    Column("accuracy", 8, True),
                    Column("twin", 6, True),
                    Column("added", 7, True),
                    Column("kept", 5, True),
                    Column("return", 8, True),
                ],
                len(scores),
                lambda i, scores=scores: _cells(scores[i], palette),  # type: ignore[misc]
                palette.cursor,
            )

    def on_rows_table_chosen(self, event: RowsTable.Chosen) -> None:
        scores = self.best if event.table is self.episode_table else self.rounds
        self.post_message(self.EpisodeChosen(scores[event.row]))


def _cells(score: Score, palette: Palette) -> list[Cell]:
    one = score.environment is not None
    style = palette.good if score.gain >= 0 else palette.bad
    return [
        Text(written(score.gain, "+.3f"), style=style),
        str(score.round),
        *([str(score.environment), score.task] if one else []),
        written(score.accuracy),
        written(score.twin),
        count(score.added),
        f"{score.fossilised:.0f}" if one else f"{score.fossilised:.2f}",
        written(score.episode_return, "+.3f"),
    ]
