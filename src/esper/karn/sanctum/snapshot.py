"""A run at one moment, which every page shows, and the playhead that chooses the moment."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

from esper.karn.sanctum.log import EventLog, Index, Location
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.events import (
    AnalyticsSnapshot,
    AnomalyDetected,
    CounterfactualMatrixComputed,
    DecisionsMade,
    EpisodeOutcome,
    EpisodeStarted,
    EpochCompleted,
    Event,
    GovernorRollback,
    Number,
    PPOUpdateCompleted,
    SeedContributions,
    SeedSignalsMeasured,
    TrainingFinished,
    TrainingStarted,
)

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Moment:
    """The state of a run when its event file had ``line`` lines.

    Attributes:
        log: reads the step events.
        index: index of the event file when the moment was created.
        line: the last line that counts; None for all lines.
    """

    log: EventLog
    index: Index
    line: int | None = None

    def events(self, kind: type[E]) -> Sequence[E]:
        """Return the events of a kind that is kept."""
        return self.index.until(kind, self.line)

    def latest(self, kind: type[E]) -> E | None:
        """Return the last event of a kind that is kept."""
        return self.index.last(kind, self.line)[1]

    @cached_property
    def start(self) -> TrainingStarted | None:
        """The start event of the last process; None before the first."""
        return self.latest(TrainingStarted)

    @cached_property
    def finished(self) -> TrainingFinished | None:
        """The end event; None while the run continues, also after a resume."""
        start, _ = self.index.last(TrainingStarted, self.line)
        end, event = self.index.last(TrainingFinished, self.line)
        return event if end > start else None

    @property
    def outcomes(self) -> Sequence[EpisodeOutcome]:
        """The outcome of each round."""
        return self.events(EpisodeOutcome)

    @property
    def updates(self) -> Sequence[PPOUpdateCompleted]:
        """The policy's updates."""
        return self.events(PPOUpdateCompleted)

    @property
    def snapshots(self) -> Sequence[AnalyticsSnapshot]:
        """Throughput and precision of each round."""
        return self.events(AnalyticsSnapshot)

    @cached_property
    def steps(self) -> int:
        """Number of step events."""
        locations = self.index.locations[EpochCompleted]
        if self.line is None:
            return len(locations)
        return bisect_right(locations, self.line, key=attrgetter("line"))

    @cached_property
    def step(self) -> EpochCompleted | None:
        """The last environment step; None before the first, and at telemetry level minimal."""
        if not self.steps:
            return None
        return self._read(EpochCompleted, self.index.locations[EpochCompleted][self.steps - 1])

    def episode(self, round_number: int) -> list[EpochCompleted]:
        """Return the steps of a round so far."""
        return self._of_round(EpochCompleted, round_number)

    def signals(self, round_number: int) -> list[SeedSignalsMeasured]:
        """Return the seed signals of a round so far; empty below telemetry level debug."""
        return self._of_round(SeedSignalsMeasured, round_number)

    def contribution(self, round_number: int, environment: int, slot: int) -> Number | None:
        """Return what a seed contributed when it was last recorded; None where it was not."""
        signals = self.signals(round_number)
        if signals:
            return signals[-1].contribution[environment][slot]
        events = self._of_round(SeedContributions, round_number)
        seeds = zip(events[-1].environment, events[-1].slot, strict=True) if events else ()
        index = next((i for i, seed in enumerate(seeds) if seed == (environment, slot)), None)
        return None if index is None else events[-1].contribution[index]

    def decisions(self, round_number: int) -> list[DecisionsMade]:
        """Return the decisions of a round so far; empty before schema 3."""
        return self._of_round(DecisionsMade, round_number)

    def _of_round(self, kind: type[E], round_number: int) -> list[E]:
        locations = self.index.locations[kind]
        end = len(locations)
        if self.line is not None:
            end = bisect_right(locations, self.line, key=attrgetter("line"))
        begin = bisect_left(locations, round_number, hi=end, key=attrgetter("round"))
        end = bisect_right(locations, round_number, lo=begin, hi=end, key=attrgetter("round"))
        events = (self._read(kind, location) for location in locations[begin:end])
        return [event for event in events if event is not None]

    def _read(self, kind: type[E], location: Location) -> E | None:
        event = self.log.read(location)
        return event if isinstance(event, kind) else None

    @property
    def anomalies(self) -> Sequence[AnomalyDetected]:
        """The anomalies, in order."""
        return self.events(AnomalyDetected)

    @property
    def round(self) -> int:
        """Number of the current or last round; 0 before the first outcome or step."""
        if self.step is not None:
            return self.step.round
        if self.outcomes:
            return self.outcomes[-1].round
        return 0

    @cached_property
    def rolled_back(self) -> dict[int, GovernorRollback]:
        """The last rollback of each environment that had one in the current round."""
        return {
            environment: event
            for event in self.events(GovernorRollback)
            if event.round == self.round
            for environment in event.environment
        }

    def outcome(self, round_number: int) -> EpisodeOutcome | None:
        """Return the outcome of a round; None until it is over."""
        return next((o for o in reversed(self.outcomes) if o.round == round_number), None)

    def counterfactuals(self, round_number: int) -> CounterfactualMatrixComputed | None:
        """Return the Shapley values of seeds at the end of a round; None where not computed."""
        matrices = self.events(CounterfactualMatrixComputed)
        return next((m for m in reversed(matrices) if m.round == round_number), None)

    def task(self, environment: int, round_number: int | None = None) -> str | None:
        """Return the task of an environment in a round, by default the current one.

        None while it is unknown.

        With several tasks, each group draws one per round. Before schema 3, a run records the
        draws only when the round is over.
        """
        if self.start is None:
            return None
        if len(self.start.tasks) == 1:
            return self.start.tasks[0]
        tasks = self._tasks if round_number is None else self._tasks_of(round_number)
        return tasks[environment] if environment < len(tasks) else None

    @cached_property
    def _tasks(self) -> list[str]:
        return self._tasks_of(self.round)

    def _tasks_of(self, round_number: int) -> list[str]:
        begun = reversed(self.events(EpisodeStarted))
        event = next((e for e in begun if e.round <= round_number), None)
        if event is not None and event.round == round_number:
            return event.task
        outcome = self.outcome(round_number)
        return outcome.task if outcome else []

    def slot_names(
        self, environment: int, slots: int, round_number: int | None = None
    ) -> list[str]:
        """Return the names of an environment's slots in a round, by default the current one.

        A slot has a number instead while the environment's task is unknown.
        """
        task = self.task(environment, round_number)
        names: list[str] = []
        if self.start is not None and task in self.start.tasks:
            names = self.start.slots[self.start.tasks.index(task)]
        return [*names[:slots], *(f"slot {i}" for i in range(len(names), slots))]

    def blueprint_name(self, kind: int) -> str:
        """Return a blueprint's name; before schema 3, a plugin's blueprint has only a number."""
        names = (self.start.blueprints if self.start else None) or BLUEPRINTS
        return names[kind] if 0 <= kind < len(names) else f"blueprint {kind}"


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
        steps, self._fraction = divmod(self._fraction, 1.0)
        if steps:
            self.move(int(steps))
        return bool(steps)

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
        locations = self.log.index.locations[EpochCompleted]
        if not locations:
            self.move(rounds)
            return
        position = len(locations) - 1 if self.index is None else min(self.index, len(locations) - 1)
        now = locations[position].round
        begin = bisect_left(locations, now, key=attrgetter("round"))
        if rounds < 0 and begin < position:
            rounds += 1
        self._go(bisect_left(locations, now + rounds, key=attrgetter("round")), len(locations) - 1)

    def show(self, round_number: int) -> None:
        """Pause at the last step of a round."""
        locations = self.log.index.locations[EpochCompleted]
        if locations:
            end = bisect_left(locations, round_number + 1, key=attrgetter("round")) - 1
            self._go(max(0, end), len(locations) - 1)
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
    locations = index.locations[EpochCompleted]
    if locations:
        return [location.line for location in locations]
    lists = index.lists.get(EpisodeOutcome)
    return lists.lines if lists else []
