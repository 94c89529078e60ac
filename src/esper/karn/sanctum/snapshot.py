"""A run at one moment, which every page shows."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

from esper.karn.sanctum.log import EventLog, Index, Place
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
        found = self.events(kind)
        return found[-1] if found else None

    @cached_property
    def started(self) -> TrainingStarted | None:
        """The start event of the last process; None before the first."""
        return self.latest(TrainingStarted)

    @cached_property
    def finished(self) -> TrainingFinished | None:
        """The end event; None while the run continues, also after a resume."""
        ends, starts = self.index.kept.get(TrainingFinished), self.index.kept.get(TrainingStarted)
        end = self.latest(TrainingFinished)
        if end is None or ends is None or starts is None:
            return end
        resumed = len(self.events(TrainingStarted)) > bisect_left(
            starts.lines, ends.lines[len(self.events(TrainingFinished)) - 1]
        )
        return None if resumed else end

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
        places = self.index.places[EpochCompleted]
        if self.line is None:
            return len(places)
        return bisect_right(places, self.line, key=attrgetter("line"))

    @cached_property
    def step(self) -> EpochCompleted | None:
        """The last environment step; None before the first, and at telemetry level minimal."""
        if not self.steps:
            return None
        return self._read(EpochCompleted, self.index.places[EpochCompleted][self.steps - 1])

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
        place = next((i for i, own in enumerate(seeds) if own == (environment, slot)), None)
        return None if place is None else events[-1].contribution[place]

    def decisions(self, round_number: int) -> list[DecisionsMade]:
        """Return the decisions of a round so far; empty before schema 3."""
        return self._of_round(DecisionsMade, round_number)

    def _of_round(self, kind: type[E], round_number: int) -> list[E]:
        places = self.index.places[kind]
        end = len(places)
        if self.line is not None:
            end = bisect_right(places, self.line, key=attrgetter("line"))
        begin = bisect_left(places, round_number, hi=end, key=attrgetter("round"))
        end = bisect_right(places, round_number, lo=begin, hi=end, key=attrgetter("round"))
        found = (self._read(kind, place) for place in places[begin:end])
        return [event for event in found if event is not None]

    def _read(self, kind: type[E], place: Place) -> E | None:
        event = self.log.read(place)
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
        if self.started is None:
            return None
        if len(self.started.tasks) == 1:
            return self.started.tasks[0]
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
        if self.started is not None and task in self.started.tasks:
            names = self.started.slots[self.started.tasks.index(task)]
        return [*names[:slots], *(f"slot {i}" for i in range(len(names), slots))]

    def blueprint_name(self, kind: int) -> str:
        """Return a blueprint's name; before schema 3, a plugin's blueprint has only a number."""
        names = (self.started.blueprints if self.started else None) or BLUEPRINTS
        return names[kind] if 0 <= kind < len(names) else f"blueprint {kind}"
