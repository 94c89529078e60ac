"""Which moment is shown: the latest, or one of the past, step by step."""

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

from esper.karn.sanctum.log import EventLog, Index
from esper.karn.sanctum.snapshot import Moment
from esper.leyline.events import EpisodeOutcome, EpochCompleted

SPEEDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Environment steps of a replay that pass in a second."""


@dataclass(slots=True)
class Playhead:
    """A place in the run's steps, or at its end. A run without steps is played by its rounds.

    Attributes:
        log: the run's events.
        place: marks passed; None follows the run.
        playing: whether time passes.
        speed: place in ``SPEEDS``.
    """

    log: EventLog
    place: int | None = None
    playing: bool = False
    speed: int = 4
    _part: float = 0.0

    def moment(self) -> Moment:
        """The run as it stood there."""
        index = self.log.index
        marks = _marks(index)
        if self.place is None or self.place >= len(marks):
            return Moment(self.log, index)
        return Moment(self.log, index, marks[self.place])

    @property
    def live(self) -> bool:
        """Whether the end of the run is shown."""
        return self.place is None

    @property
    def steps_per_second(self) -> int:
        """How fast a replay goes."""
        return SPEEDS[self.speed]

    def advance(self, seconds: float) -> bool:
        """Let time pass; whether another moment is shown now."""
        if not self.playing or self.place is None:
            return False
        self._part += seconds * self.steps_per_second
        whole, self._part = divmod(self._part, 1.0)
        if whole:
            self.move(int(whole))
        return bool(whole)

    def move(self, marks: int) -> None:
        """Go forward, or back where negative; beyond the last one the run is followed again."""
        last = len(_marks(self.log.index)) - 1
        if last < 0:
            return
        target = (last if self.place is None else self.place) + marks
        self._go(max(0, target), last)

    def step(self, by: int) -> None:
        """Stop, and go ``by`` marks on or back."""
        self.playing = False
        self.move(by)

    def move_rounds(self, rounds: int) -> None:
        """Go to the beginning of another round."""
        places = self.log.index.places[EpochCompleted]
        if not places:
            self.move(rounds)
            return
        here = len(places) - 1 if self.place is None else min(self.place, len(places) - 1)
        now = places[here].round
        begin = bisect_left(places, now, key=attrgetter("round"))
        if rounds < 0 and begin < here:
            rounds += 1
        self._go(bisect_left(places, now + rounds, key=attrgetter("round")), len(places) - 1)

    def show(self, round_number: int) -> None:
        """Stop at the end of a round."""
        places = self.log.index.places[EpochCompleted]
        if places:
            end = bisect_left(places, round_number + 1, key=attrgetter("round")) - 1
            self._go(max(0, end), len(places) - 1)
        self.playing = False

    def replay(self) -> None:
        """Play from the beginning."""
        if _marks(self.log.index):
            self.place, self.playing, self._part = 0, True, 0.0

    def toggle(self) -> None:
        """Stop where it stands, or go on."""
        marks = len(_marks(self.log.index))
        if self.place is None and marks:
            self.place, self.playing = marks - 1, False
        elif self.place is not None:
            self.playing = not self.playing

    def follow(self) -> None:
        """Show the end of the run, and what comes."""
        self.place, self.playing = None, False

    def change_speed(self, by: int) -> None:
        """Play faster or slower."""
        self.speed = max(0, min(len(SPEEDS) - 1, self.speed + by))

    def _go(self, target: int, last: int) -> None:
        if target > last:
            self.follow()
        else:
            self.place = max(0, target)


def _marks(index: Index) -> list[int]:
    """Lines at which a replay can stop."""
    places = index.places[EpochCompleted]
    if places:
        return [place.line for place in places]
    kept = index.kept.get(EpisodeOutcome)
    return kept.lines if kept else []
