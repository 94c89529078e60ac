"""Read a run's events and keep the data of a report: once all but the steps, then one episode."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.karn.intervals import Floats
from esper.karn.report.lives import LifeBook
from esper.karn.runs import RunInfo, inspect, stored
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

OUTCOMES = (
    "gain",
    "validation_gain",
    "test_accuracy",
    "twin_test_accuracy",
    "accuracy",
    "twin_accuracy",
    "episode_return",
    "added_parameters",
    "germinated",
    "fossilised",
    "pruned",
    "rolled_back",
)
"""Outcomes that are kept per round and environment. Those on the test split are NaN where
the run did not record them (before schema 4)."""


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


@dataclass(slots=True)
class RunData:
    """The data of a report on a run with R rounds, N environments and U updates.

    Attributes:
        label: name of the run in figures and tables.
        info: its state.
        config: content of ``config.json``.
        started: start event of the last training process.
        processes: number of training processes: 1 plus the number of resumes.
        rounds: numbers of the completed rounds, ``[R]``.
        outcomes: by name in ``OUTCOMES``, ``[R, N]``.
        tasks: the task of each environment, ``[R, N]``.
        updates: round of each update, ``[U]``.
        metrics: metrics of the updates by name, ``[U]``; NaN where missing or not a number.
        missing: where a metric was not measured, bool ``[U]`` by name. Before schema 3, a missing
            gradient was recorded as NaN.
        timed: numbers of the rounds that were timed, ``[R']``.
        speed: environment steps per second in those rounds, ``[R']``.
        seconds: wall time of rollout and update in those rounds, each ``[R']``.
        lives: lives of the seeds.
        rollbacks: number of rollbacks by round and reason.
        anomalies: anomalies that were detected during training.
        dropped: number of steps whose events the telemetry hub dropped.
        failure: why the last process failed; None where it recorded no reason.
        episode: accuracy per step of the last completed round; None where steps were not recorded.
        unreadable: number of unreadable lines.
    """

    label: str
    info: RunInfo
    config: dict[str, Any]
    started: TrainingStarted
    processes: int
    rounds: Floats
    outcomes: dict[str, Floats]
    tasks: NDArray[np.str_]
    updates: Floats
    metrics: dict[str, Floats]
    missing: dict[str, NDArray[np.bool_]]
    timed: Floats
    speed: Floats
    seconds: tuple[Floats, Floats]
    lives: LifeBook
    rollbacks: Counter[tuple[int, str]]
    anomalies: list[AnomalyDetected]
    dropped: int
    failure: str | None
    episode: Episode | None
    unreadable: int

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks that the run trains on."""
        return self.started.tasks


@dataclass(slots=True)
class _Pass:
    """Data of the events read so far. Results of a repeated round replace the earlier ones."""

    starts: list[TrainingStarted] = field(default_factory=list)
    outcomes: dict[int, Floats] = field(default_factory=dict)
    tasks: dict[int, NDArray[np.str_]] = field(default_factory=dict)
    updates: dict[int, PPOUpdateCompleted] = field(default_factory=dict)
    snapshots: dict[int, AnalyticsSnapshot] = field(default_factory=dict)
    rollbacks: Counter[tuple[int, str]] = field(default_factory=Counter)
    anomalies: list[AnomalyDetected] = field(default_factory=list)
    dropped: int = 0
    failure: str | None = None
    lives: LifeBook = field(default_factory=LifeBook)

    def take(self, event: Event) -> None:
        match event:
            case SeedStageChanged():
                self.lives.change(event)
            case EpisodeOutcome():
                self.outcomes[event.round] = _outcomes(event)
                self.tasks[event.round] = np.array(event.task, dtype=str)
                self.lives.end_round(event.round, event.task)
            case PPOUpdateCompleted():
                self.updates[event.round] = event
            case AnalyticsSnapshot():
                self.snapshots[event.round] = event
            case GovernorRollback():
                self.rollbacks.update((event.round, reason) for reason in event.reason)
            case AnomalyDetected():
                self.anomalies.append(event)
            case TelemetryDropped():
                self.dropped += event.steps
            case TrainingFinished():
                self.failure = event.message
            case TrainingStarted():
                self.starts.append(event)
                self.failure = None
                self.lives.begin_round()


def gather(run: Path) -> RunData:
    """Read a run, live or ended. Of the events of steps, only those of one round are kept.

    Raises:
        UsageError: ``run`` has no events, or no start event.
    """
    found, reader = _Pass(), EventReader(run, *_KINDS, check=True)
    impossible = 0
    for _, event in reader:
        try:
            found.take(event)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            impossible += 1  # as an environment that the run does not have
    if not found.starts:
        raise UsageError(f"run: {run} has no TRAINING_STARTED event yet; wait until it starts")
    # Rounds with another number of environments are from another run, or damaged.
    envs = found.starts[-1].envs
    rounds = sorted(n for n, outcome in found.outcomes.items() if outcome.shape[1] == envs)
    nothing = np.empty((0, len(OUTCOMES), 0))
    table = np.stack([found.outcomes[number] for number in rounds]) if rounds else nothing
    outcomes = dict(zip(OUTCOMES, table.transpose(1, 0, 2), strict=True))
    updates = [found.updates[number] for number in sorted(found.updates)]
    snapshots = [found.snapshots[number] for number in sorted(found.snapshots)]
    names = dict.fromkeys(name for update in updates for name in update.metrics)
    return RunData(
        label=_label(run),
        info=inspect(run),
        config=stored(run),
        started=found.starts[-1],
        processes=len(found.starts),
        rounds=np.array(rounds, dtype=float),
        outcomes=outcomes,
        tasks=np.array([found.tasks[number] for number in rounds], dtype=str),
        updates=np.array([float(u.round) for u in updates]),
        metrics={name: _column([u.metrics.get(name) for u in updates]) for name in names},
        missing={n: np.array([u.metrics.get(n) is None for u in updates]) for n in names},
        timed=np.array([float(s.round) for s in snapshots]),
        speed=_column([s.environment_steps_per_second for s in snapshots]),
        seconds=(
            _column([s.rollout_seconds for s in snapshots]),
            _column([s.update_seconds for s in snapshots]),
        ),
        lives=found.lives,
        rollbacks=found.rollbacks,
        anomalies=found.anomalies,
        dropped=found.dropped,
        failure=found.failure,
        episode=_last_episode(run),
        unreadable=reader.unreadable + impossible,
    )


def _label(run: Path) -> str:
    """The name of a run's directory in printable form."""
    name = run.resolve().name
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
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
    ordered = [steps[number] for number in sorted(steps)]
    try:
        return Episode(
            np.array([float(s.step) for s in ordered]),
            _table([s.validation_accuracy for s in ordered]),
            _table([s.twin_validation_accuracy for s in ordered]),
        )
    except ValueError:
        return None  # steps of different runs, or damaged ones


def _outcomes(event: EpisodeOutcome) -> Floats:
    """The values of ``OUTCOMES``, ``[len(OUTCOMES), N]``; NaN where one was not recorded."""
    unknown = [np.nan] * len(event.task)
    return _table([getattr(event, name) or unknown for name in OUTCOMES])


def _table(rows: Sequence[Sequence[Number]]) -> Floats:
    """Rows of N numbers as floats, ``[len(rows), N]``."""
    return np.array([to_floats(row) for row in rows], dtype=float)


def _column(values: Sequence[Number | None]) -> Floats:
    """Values as floats; NaN where one is missing."""
    return np.array([np.nan if v is None else float(v) for v in values])
