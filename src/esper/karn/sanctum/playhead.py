"""The playhead: the moment that is shown, either the latest or a past one."""

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

from esper.karn.sanctum.log import EventLog, Index
from esper.karn.sanctum.snapshot import Moment
from esper.leyline.events import EpisodeOutcome, EpochCompleted

SPEEDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Speeds of a replay, environment steps per second."""


@dataclass(slots=True)
class Playhead:
    """A step of the run, or its latest moment; in a run without step events, a round.

    Attributes:
        log: the run's events.
        index: position of the step or round that is shown; None follows the run.
        playing: whether a replay is running.
        speed: index in ``SPEEDS``.
    """

    log: EventLog
    index: int | None = None
    playing: bool = False
    speed: int = 4
    _fraction: float = 0.0

    def moment(self) -> Moment:
        """Return the run as it was at the playhead."""
        index = self.log.index
        marks = _marks(index)
        if self.index is None or self.index >= len(marks):
            return Moment(self.log, index)
        return Moment(self.log, index, marks[self.index])

    @property
    def live(self) -> bool:
        """Whether the end of the run is shown."""
        return self.index is None

    @property
    def steps_per_second(self) -> int:
        """Speed of a replay."""
        return SPEEDS[self.speed]

    def advance(self, seconds: float) -> bool:
        """Continue a replay for ``seconds``; return whether the moment changed."""
        if not self.playing or self.index is None:
            return False
        self._fraction += seconds * self.steps_per_second
        whole, self._fraction = divmod(self._fraction, 1.0)
        if whole:
            self.move(int(whole))
        return bool(whole)

    def move(self, marks: int) -> None:
        """Go ``marks`` steps forward, or back if negative; past the last one, follow the run."""
        last = len(_marks(self.log.index)) - 1
        if last < 0:
            return
        target = (last if self.index is None else self.index) + marks
        self._go(max(0, target), last)

    def step(self, by: int) -> None:
        """Pause, and go ``by`` steps forward, or back if negative."""
        self.playing = False
        self.move(by)

    def move_rounds(self, rounds: int) -> None:
        """Go to the first step of the round that is ``rounds`` later, or earlier if negative.

        From within a round, -1 goes to the first step of that round.
        """
        places = self.log.index.places[EpochCompleted]
        if not places:
            self.move(rounds)
            return
        here = len(places) - 1 if self.index is None else min(self.index, len(places) - 1)
        now = places[here].round
        begin = bisect_left(places, now, key=attrgetter("round"))
        if rounds < 0 and begin < here:
            rounds += 1
        self._go(bisect_left(places, now + rounds, key=attrgetter("round")), len(places) - 1)

    def show(self, round_number: int) -> None:
        """Pause at the last step of a round."""
        places = self.log.index.places[EpochCompleted]
        if places:
            end = bisect_left(places, round_number + 1, key=attrgetter("round")) - 1
            self._go(max(0, end), len(places) - 1)
        self.playing = False

    def replay(self) -> None:
        """Play from the beginning."""
        if _marks(self.log.index):
            self.index, self.playing, self._fraction = 0, True, 0.0

    def toggle(self) -> None:
        """Pause, or continue."""
        marks = len(_marks(self.log.index))
        if self.index is None and marks:
            self.index, self.playing = marks - 1, False
        elif self.index is not None:
            self.playing = not self.playing

    def follow(self) -> None:
        """Follow the run: show its latest moment."""
        self.index, self.playing = None, False

    def change_speed(self, by: int) -> None:
        """Change the speed by ``by`` places in ``SPEEDS``."""
        self.speed = max(0, min(len(SPEEDS) - 1, self.speed + by))

    def _go(self, target: int, last: int) -> None:
        if target > last:
            self.follow()
        else:
            self.index = max(0, target)


def _marks(index: Index) -> list[int]:
    """Line numbers of the events, one per step or round, at which a replay can stop."""
    places = index.places[EpochCompleted]
    if places:
        return [place.line for place in places]
    kept = index.kept.get(EpisodeOutcome)
    return kept.lines if kept else []
