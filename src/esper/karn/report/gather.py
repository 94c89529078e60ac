"""One pass over a run's events, keeping what a report shows of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.karn.report.intervals import Floats
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
    "accuracy",
    "twin_accuracy",
    "utility",
    "twin_utility",
    "episode_return",
    "added_parameters",
    "germinated",
    "fossilised",
    "pruned",
    "rolled_back",
)
"""What is kept of a round for every environment."""


@dataclass(slots=True)
class Episode:
    """Validation accuracy of the last whole round, step by step, ``[T, N]``."""

    steps: Floats
    grown: Floats
    twin: Floats


@dataclass(slots=True)
class RunData:
    """What a report shows of a run. R rounds, N environments, U updates.

    Attributes:
        label: what the run is called beside others.
        info: how it stands.
        config: content of ``config.json``.
        started: the last process that began to train.
        processes: how many processes began to train.
        rounds: numbers of the whole rounds, ``[R]``.
        outcomes: by name in ``OUTCOMES``, ``[R, N]``; also gain and utility_gain, what is above
            the twin's.
        tasks: the task of each environment, ``[R, N]``.
        updates: rounds of the updates, ``[U]``.
        metrics: of the updates by name, ``[U]``; NaN where missing or not a number.
        missing: where a metric was not measured, bool ``[U]`` by name. Before schema 3 a missing
            gradient was NaN.
        speed: environment steps a second, ``[R']`` for the rounds ``timed``.
        seconds: wall time of rollout and update, each ``[R']``.
        lives: of the seeds.
        rollbacks: how often a round had a rollback for a reason.
        anomalies: what training itself found wrong.
        dropped: steps without events, for the disk could not keep up.
        failure: why the last process failed, None where it recorded no reason.
        episode: the last whole round step by step, None where steps were not recorded.
        unreadable: lines that could not be read.
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
        return self.started.tasks


@dataclass(slots=True)
class _Pass:
    """What was read so far. Rounds that were run again count as they came out the last time."""

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
    steps: dict[int, EpochCompleted] = field(default_factory=dict)
    episode: Episode | None = None

    def take(self, event: Event) -> None:
        match event:
            case EpochCompleted():
                self.steps[event.step] = event
            case SeedStageChanged():
                self.lives.change(event)
            case EpisodeOutcome():
                self.outcomes[event.round] = _table([getattr(event, name) for name in OUTCOMES])
                self.tasks[event.round] = np.array(event.task, dtype=str)
                self.lives.end_round(event.round, event.task)
                self.episode = _episode(self.steps)
                self.steps = {}
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
                self.steps = {}


def gather(run: Path) -> RunData:
    """Read a run, live or ended. Steps are kept for one round at a time.

    Raises:
        UsageError: ``run`` holds no events, or none that says what was trained.
    """
    found, reader = _Pass(), EventReader(run)
    for _, event in reader:
        found.take(event)
    if not found.starts:
        raise UsageError(f"run: {run} does not say yet what it trains; wait for its first event")
    rounds = sorted(found.outcomes)
    nothing = np.empty((0, len(OUTCOMES), found.starts[-1].envs))
    table = np.stack([found.outcomes[number] for number in rounds]) if rounds else nothing
    outcomes = dict(zip(OUTCOMES, table.transpose(1, 0, 2), strict=True))
    outcomes["gain"] = outcomes["accuracy"] - outcomes["twin_accuracy"]
    outcomes["utility_gain"] = outcomes["utility"] - outcomes["twin_utility"]
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
        episode=found.episode,
        unreadable=reader.unreadable,
    )


def _label(run: Path) -> str:
    """The name of a run's directory as one can print it."""
    name = run.resolve().name
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    # Matplotlib hides a curve whose label begins with an underscore.
    return f"run {printable}" if printable.startswith("_") else printable


def _episode(steps: dict[int, EpochCompleted]) -> Episode | None:
    if not steps:
        return None
    ordered = [steps[number] for number in sorted(steps)]
    return Episode(
        np.array([float(s.step) for s in ordered]),
        _table([s.validation_accuracy for s in ordered]),
        _table([s.twin_validation_accuracy for s in ordered]),
    )


def _table(rows: Sequence[Sequence[Number]]) -> Floats:
    """Rows of equal length as floats, ``[len(rows), N]``."""
    return np.array([to_floats(row) for row in rows], dtype=float)


def _column(values: Sequence[Number | None]) -> Floats:
    """Values as floats; NaN where one is missing."""
    return np.array([np.nan if v is None else float(v) for v in values])
