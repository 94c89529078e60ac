"""Read a run's events and keep the data of a report: once all but the steps, then one episode."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.karn.final_figures import FIGURES, last_tenth
from esper.karn.intervals import Floats
from esper.karn.runs import config_of, inspect
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    AnalyticsSnapshot,
    AnomalyDetected,
    EpisodeOutcome,
    EpochCompleted,
    Event,
    GovernorRollback,
    Number,
    PPOUpdateCompleted,
    SeedStageChanged,
    TelemetryDropped,
    TrainingFinished,
    TrainingStarted,
    to_floats,
)
from esper.leyline.events.reader import EventReader
from esper.leyline.notices import escape

SEED_OUTCOMES: Final = ("fossilised", "unfinished", "pruned", "rolled back")
"""How a seed ends: kept for good; alive when the episode ended; pruned, by the policy or by a
rollback; removed, but never recorded as PRUNED."""

_ENDINGS: Final = {"PRUNED": "pruned", "DORMANT": "rolled back"}
_AFTERWARDS: Final = ("EMBARGOED", "RESETTING")


@dataclass(slots=True)
class SeedLife:
    """One seed of one episode.

    Attributes:
        environment: the environment it grew in.
        slot: index of the slot in the host.
        blueprint: name of its blueprint.
        stages: (first step, name) of each stage, in order.
        end: step at which it was removed; None while it is alive.
        outcome: one of ``SEED_OUTCOMES``.
    """

    environment: int
    slot: int
    blueprint: str
    stages: list[tuple[int, str]]
    end: int | None = None
    outcome: str = "unfinished"

    @property
    def birth(self) -> int:
        """Step of germination."""
        return self.stages[0][0]


class SeedKey(NamedTuple):
    """The key by which seeds are counted; ``step`` is the step of germination."""

    task: str
    slot: int
    blueprint: str
    step: int
    outcome: str


@dataclass(slots=True)
class LifeBook:
    """Counts of seeds per completed round, and the lives of seeds in the last one.

    Attributes:
        seed_counts: number of seeds per ``SeedKey``, by round.
        last: lives of the seeds in the last completed round.
    """

    seed_counts: dict[int, Counter[SeedKey]] = field(default_factory=dict)
    last: list[SeedLife] = field(default_factory=list)
    _lives: list[SeedLife] = field(default_factory=list)
    _living: dict[tuple[int, int], SeedLife] = field(default_factory=dict)

    def change(self, event: SeedStageChanged) -> None:
        """Record the stage changes of one step."""
        slots = zip(event.environment, event.slot, strict=True)
        for slot, blueprint, stage in zip(slots, event.blueprint, event.stage, strict=True):
            if stage == "GERMINATED":
                life = SeedLife(*slot, blueprint, [(event.step, stage)])
                self._living[slot] = life
                self._lives.append(life)
            elif stage in _ENDINGS and slot in self._living:
                life = self._living.pop(slot)
                life.end, life.outcome = event.step, _ENDINGS[stage]
            elif stage not in _AFTERWARDS and slot in self._living:
                self._living[slot].stages.append((event.step, stage))

    def end_round(self, round_number: int, tasks: list[str]) -> None:
        """Count the seeds of a round that has ended; ``tasks`` has the task of each environment."""
        for life in self._living.values():
            if life.stages[-1][1] == "FOSSILISED":
                life.outcome = "fossilised"
        self.seed_counts[round_number] = Counter(
            SeedKey(tasks[life.environment], life.slot, life.blueprint, life.birth, life.outcome)
            for life in self._lives
        )
        self.last = self._lives
        self.begin_round()

    def begin_round(self) -> None:
        """Start a new round; discard the lives of a round that was not completed."""
        self._lives, self._living = [], {}


_KINDS = (
    AnalyticsSnapshot,
    AnomalyDetected,
    EpisodeOutcome,
    GovernorRollback,
    PPOUpdateCompleted,
    SeedStageChanged,
    TelemetryDropped,
    TrainingFinished,
    TrainingStarted,
)
"""The kinds that are read from first to last: all but the large ones of steps."""


@dataclass(slots=True)
class Episode:
    """Validation accuracy of the last completed round, per step and environment, ``[T, N]``."""

    steps: Floats
    grown: Floats
    twin: Floats


class RunData:
    """The data of a report on a run, live or ended, with R rounds, N environments and U updates.

    Results of a repeated round replace the earlier ones.

    Args:
        run: the run directory.

    Attributes:
        label: name of the run in figures and tables.
        info: its state.
        config: content of ``config.json``.
        start: start event of the last training process.
        processes: number of training processes: 1 plus the number of resumes.
        rounds: numbers of the completed rounds, ``[R]``.
        outcomes: by name in ``FIGURES``, ``[R, N]``; those on the test split are NaN where the run
            did not record them (before schema 4).
        tasks: the task of each environment, ``[R, N]``.
        updates: round of each update, ``[U]``.
        metrics: metrics of the updates by name, ``[U]``; NaN where missing or not a number.
        missing: where a metric was not measured, bool ``[U]`` by name. Before schema 3, a missing
            gradient was recorded as NaN.
        timed_rounds: numbers of the rounds that were timed, ``[R']``.
        speed: environment steps per second in those rounds, ``[R']``.
        seconds: wall time of rollout and update in those rounds, each ``[R']``.
        lives: lives of the seeds.
        rollbacks: number of rollbacks by round and reason.
        anomalies: anomalies that were detected during training.
        dropped_steps: number of steps whose events the telemetry hub dropped.
        failure: why the last process failed; None where it recorded no reason.
        episode: accuracy per step of the last completed round; None where steps were not recorded.
        unreadable: number of unreadable lines.

    Raises:
        UsageError: ``run`` has no events, or no start event.
    """

    def __init__(self, run: Path):
        self.dropped_steps = self.unreadable = 0
        self.failure: str | None = None
        self.lives = LifeBook()
        self.rollbacks: Counter[tuple[int, str]] = Counter()
        self.anomalies: list[AnomalyDetected] = []
        self._starts: list[TrainingStarted] = []
        self._outcomes: dict[int, tuple[Floats, NDArray[np.str_]]] = {}
        self._updates: dict[int, PPOUpdateCompleted] = {}
        self._snapshots: dict[int, AnalyticsSnapshot] = {}
        self._read(run)
        if not self._starts:
            raise UsageError(f"run: {run} has no TRAINING_STARTED event yet; wait until it starts")
        self.start, self.processes = self._starts[-1], len(self._starts)
        self.label, self.info, self.config = _label(run), inspect(run), config_of(run)
        self.episode = _last_episode(run)
        self._set_rounds()
        self._set_updates()

    def _read(self, run: Path) -> None:
        """Read all events but those of steps."""
        reader = EventReader(run, *_KINDS, check=True)
        for _, event in reader:
            try:
                self._add(event)
            except (ArithmeticError, LookupError, TypeError, ValueError):
                self.unreadable += 1  # as an environment that the run does not have
        self.unreadable += reader.unreadable

    def _add(self, event: Event) -> None:
        match event:
            case SeedStageChanged():
                self.lives.change(event)
            case EpisodeOutcome():
                self._outcomes[event.round] = _outcomes(event), np.array(event.task, dtype=str)
                self.lives.end_round(event.round, event.task)
            case PPOUpdateCompleted():
                self._updates[event.round] = event
            case AnalyticsSnapshot():
                self._snapshots[event.round] = event
            case GovernorRollback():
                self.rollbacks.update((event.round, reason) for reason in event.reason)
            case AnomalyDetected():
                self.anomalies.append(event)
            case TelemetryDropped():
                self.dropped_steps += event.steps
            case TrainingFinished():
                self.failure = event.message
            case TrainingStarted():
                self._starts.append(event)
                self.failure = None
                self.lives.begin_round()

    def _set_rounds(self) -> None:
        # Rounds with another number of environments are from another run, or damaged.
        rounds = [
            (number, *values)
            for number, values in sorted(self._outcomes.items())
            if values[0].shape[1] == self.start.envs
        ]
        nothing = np.empty((0, len(FIGURES), 0))
        table = np.stack([figures for _, figures, _ in rounds]) if rounds else nothing
        self.rounds = np.array([number for number, _, _ in rounds], dtype=float)
        self.outcomes = dict(zip(FIGURES, table.transpose(1, 0, 2), strict=True))
        self.tasks = np.array([tasks for _, _, tasks in rounds], dtype=str)
        timed_rounds = [self._snapshots[number] for number in sorted(self._snapshots)]
        self.timed_rounds = np.array([float(s.round) for s in timed_rounds])
        self.speed = _column([s.environment_steps_per_second for s in timed_rounds])
        self.seconds = (
            _column([s.rollout_seconds for s in timed_rounds]),
            _column([s.update_seconds for s in timed_rounds]),
        )

    def _set_updates(self) -> None:
        updates = [self._updates[number] for number in sorted(self._updates)]
        names = dict.fromkeys(name for update in updates for name in update.metrics)
        values = {name: [update.metrics.get(name) for update in updates] for name in names}
        self.updates = np.array([float(update.round) for update in updates])
        self.metrics = {name: _column(column) for name, column in values.items()}
        self.missing = {n: np.array([v is None for v in values[n]], dtype=bool) for n in names}

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks that the run trains on."""
        return self.start.tasks

    @property
    def final_rounds(self) -> slice:
        """The last tenth of the completed rounds, at least one."""
        return slice(-last_tenth(len(self.rounds)), None)


def _label(run: Path) -> str:
    """The name of a run's directory in printable form."""
    printable = escape(run.resolve().name)
    # Matplotlib hides a curve whose label begins with an underscore.
    return f"run {printable}" if printable.startswith("_") else printable


def _last_episode(run: Path) -> Episode | None:
    """The steps before the last outcome, read from the end of the events."""
    steps: dict[int, EpochCompleted] = {}
    within = False
    for event in EventReader(run).backwards():
        if isinstance(event, EpisodeOutcome | TrainingStarted) and within:
            break
        within = within or isinstance(event, EpisodeOutcome)
        if isinstance(event, EpochCompleted) and within:
            steps.setdefault(event.step, event)
    if not steps:
        return None
    epochs = [steps[number] for number in sorted(steps)]
    try:
        return Episode(
            np.array([float(s.step) for s in epochs]),
            _table([s.validation_accuracy for s in epochs]),
            _table([s.twin_validation_accuracy for s in epochs]),
        )
    except ValueError:
        return None  # steps of different runs, or damaged ones


def _outcomes(event: EpisodeOutcome) -> Floats:
    """The values of ``FIGURES``, ``[len(FIGURES), N]``; NaN where one was not recorded."""
    unknown = [np.nan] * len(event.task)
    return _table([getattr(event, name) or unknown for name in FIGURES])


def _table(rows: Sequence[Sequence[Number]]) -> Floats:
    """Rows of N numbers as floats, ``[len(rows), N]``."""
    return np.array([to_floats(row) for row in rows], dtype=float)


def _column(values: Sequence[Number | None]) -> Floats:
    """Values as floats; NaN where one is missing."""
    return np.array([np.nan if v is None else float(v) for v in values])
