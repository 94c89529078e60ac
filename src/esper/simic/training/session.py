"""One process of a run: rounds, updates, telemetry and checkpoints of any trainee."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from esper.leyline.config import TrainConfig, flatten
from esper.leyline.disk import sync
from esper.leyline.events import (
    AnalyticsSnapshot,
    CheckpointSaved,
    PolicyUpdateCompleted,
    PPOUpdateCompleted,
    TrainingFinished,
    UpdateRefused,
    number,
)
from esper.leyline.metrics import Metric, part_metric
from esper.leyline.notices import notice
from esper.leyline.precision_text import precision_text
from esper.nissa.hub import Hub
from esper.nissa.sinks import run_sinks
from esper.simic.distributed.cluster import ActorsLost
from esper.simic.optimizer import GROUPS
from esper.simic.ppo import PPOAgent
from esper.simic.records.record_writer import RecordWriter
from esper.simic.rollout import Rollout
from esper.simic.run.checkpoint import save, what_stays
from esper.simic.run.identity import Identity
from esper.simic.run.run_directory import RunDirectory
from esper.simic.training.anomaly_detector import AnomalyDetector
from esper.simic.training.gym_trainee import GymSummary
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.replay import write_refusal
from esper.simic.training.stop_signal import StopRequest, StopSignal
from esper.simic.training.trainee import AnyStep, Trainee

AnySummary = RoundSummary | GymSummary


class Observer(Protocol):
    """Receives notifications of a run's progress."""

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """Called when training begins; earlier processes completed ``done`` rounds."""
        ...

    def stepped(self, step: AnyStep) -> None:
        """Called after every environment step."""
        ...

    def round_done(self, summary: AnySummary) -> None:
        """Called after every round, after its checkpoint if one is due."""
        ...


class NullObserver:
    """An observer that does nothing."""

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """See ``Observer``."""

    def stepped(self, step: AnyStep) -> None:
        """See ``Observer``."""

    def round_done(self, summary: AnySummary) -> None:
        """See ``Observer``."""


MAX_REFUSALS = 3
"""Number of refused updates in a row after which the run stops."""


class _Refusal(Exception):
    """Too many updates in a row were refused."""

    def __str__(self) -> str:
        return (
            f"{MAX_REFUSALS} updates in a row produced non-finite values, so the run stops; "
            "its checkpoint and the files under refused/ are kept"
        )


@dataclass(slots=True)
class Session:
    """One process of a run.

    Attributes:
        directory: the run directory, locked by this process.
        trainee: environments and policy.
        observer: notified of every step and round.
        stop: records whether a signal was received.
        identity: what checkpoints belong to.
        checkpoint_round: round of the latest checkpoint, None if there is none.
        records: writes the rollouts of rounds; None if they are not recorded.
        events_bytes: length of the event lines at the end of the last round.
        refusals: number of updates in a row that were refused.
        detector: detects anomalies in learning.
    """

    directory: RunDirectory
    trainee: Trainee
    observer: Observer
    stop: StopSignal
    identity: Identity
    checkpoint_round: int | None = None
    records: RecordWriter | None = None
    events_bytes: int = 0
    refusals: int = 0
    detector: AnomalyDetector = field(default_factory=AnomalyDetector)

    @property
    def config(self) -> TrainConfig:
        """The resolved settings."""
        return self.trainee.config

    @property
    def agent(self) -> PPOAgent[Any] | None:
        """The learner, None for a policy that does not learn."""
        return self.trainee.agent

    def run(self, done: int) -> tuple[str, int, list[Any]]:
        """Run rounds ``done + 1`` to the total; returns status, exit code and summaries."""
        total = self.config.world.rounds
        output = self.config.output
        hub = Hub(run_sinks(self.directory.path, output), output.telemetry_level)
        summaries: list[Any] = []
        status, code = "finished", 0
        try:
            self._announce(hub, done)
            try:
                for number in range(done + 1, total + 1):
                    self.stop.check()
                    summaries.append(self._round(hub, number))
                    if number % self.config.output.checkpoint_every == 0 or number == total:
                        self._save(hub, number)
                    # After saving, so that a reported round is not lost if the process dies.
                    self.observer.round_done(summaries[-1])
                    if self.refusals == MAX_REFUSALS:
                        raise _Refusal
            except StopRequest:
                assert self.stop.number is not None
                status, code = "interrupted", 128 + self.stop.number
                # Incomplete rollouts are discarded: weights are those of the last complete round.
                self._save(hub, done + len(summaries))
            except (_Refusal, ActorsLost) as error:
                line = str(error)
                if isinstance(error, ActorsLost):
                    line = f"ray: {error}, so the run stops; --resume continues its checkpoint"
                notice(f"esper: {line}")
                status, code = "failed", 1
                self._save(hub, done + len(summaries))
            if self.agent is not None and self.checkpoint_round != done + len(summaries):
                code = 1
            self._emit_end(hub, done + len(summaries), status)
        except (Exception, SystemExit) as error:
            self._emit_end(hub, done + len(summaries), "failed", repr(error))
            raise
        finally:
            hub.close()
        return status, code, summaries

    @staticmethod
    def _emit_end(hub: Hub, done: int, status: str, message: str | None = None) -> None:
        hub.emit(TrainingFinished(time=time.time(), round=done, status=status, message=message))

    def _announce(self, hub: Hub, done: int) -> None:
        hub.emit(self.trainee.start_event(done))
        self._note_events(hub)
        self.observer.started(self.directory.path, self.config, done, self.trainee.steps)

    def _note_events(self, hub: Hub) -> None:
        """Record the length of the event file at the end of a round."""
        hub.flush()
        self.events_bytes = self.directory.events_length()

    def _round(self, hub: Hub, index: int) -> Any:
        def on_step(step: AnyStep) -> None:
            self.observer.stepped(step)
            if not step.done:
                self.stop.check()

        begin = time.perf_counter()
        rollout = self.trainee.collect(hub, index, on_step)
        collect_end = time.perf_counter()
        self._record(index, rollout)
        record_end = time.perf_counter()
        metrics: dict[str, float | None] = self.agent.update(rollout) if self.agent else {}
        end = time.perf_counter()

        speed = self.trainee.count * self.trainee.steps / (end - begin)
        update = self._update_completed(index, metrics) if self.agent else None
        snapshot = self._snapshot(index, metrics, speed, collect_end - begin, end - record_end)
        if update is not None:
            hub.emit(update)
            self._note_refusal(hub, index)
        hub.emit(snapshot)
        for anomaly in self.detector.observe(update, snapshot):
            hub.emit(anomaly)
        summary = self.trainee.finish(hub, index, speed, metrics)
        self._note_events(hub)
        return summary

    def _record(self, index: int, rollout: Rollout[Any]) -> None:
        """Write the record of a round, before a checkpoint can say that the round is done."""
        if self.records is None:
            return
        record = self.trainee.record(index, rollout)
        if record is not None:
            self.records.write(record)

    def _update_completed(self, index: int, metrics: dict[str, float | None]) -> PPOUpdateCompleted:
        assert self.agent is not None, "no learner"
        numbers = {name: None if v is None else number(v) for name, v in metrics.items()}
        by_ppo = self.config.method.algorithm == "ppo"
        kind = PPOUpdateCompleted if by_ppo else PolicyUpdateCompleted
        return kind(time=time.time(), round=index, update=self.agent.updates, metrics=numbers)

    def _snapshot(
        self,
        index: int,
        metrics: dict[str, float | None],
        speed: float,
        rollout_seconds: float,
        update_seconds: float,
    ) -> AnalyticsSnapshot:
        precision, agent = self.trainee.precision, self.agent
        return AnalyticsSnapshot(
            time=time.time(),
            round=index,
            amp_enabled=precision.enabled,
            amp_dtype=precision.dtype_name,
            learning_rate=metrics.get(Metric.LEARNING_RATE),
            learning_rates={
                group: rate
                for group in GROUPS
                if (rate := metrics.get(part_metric(Metric.LEARNING_RATE, group))) is not None
            },
            amp_policy=agent is not None and agent.policy.amp_dtype is not None,
            amp_policy_dtype=None if agent is None else agent.policy.amp_dtype_name,
            amp_scale=self.trainee.amp_scale(),
            amp_policy_scale=metrics.get(Metric.AMP_SCALE),
            environment_steps_per_second=speed,
            rollout_seconds=rollout_seconds,
            update_seconds=update_seconds,
        )

    def _note_refusal(self, hub: Hub, index: int) -> None:
        """Report a refused update, and write the file from which it can be replayed."""
        assert self.agent is not None
        if self.agent.refusal is None:
            self.refusals = 0
            return
        self.refusals += 1
        try:
            path = write_refusal(self.directory.path, index, self.agent, flatten(self.config))
            relative, advice = self._relative(path), f"esper replay {path} repeats it"
        except OSError as error:
            relative, advice = "", f"the file that repeats it was not written ({error.strerror})"
        tensor = self.agent.refusal.tensor
        dtypes = self.trainee.precision.dtype_name, self.agent.policy.amp_dtype_name
        precision = precision_text(*dtypes)
        hub.emit(
            UpdateRefused(
                time=time.time(),
                round=index,
                tensor=tensor,
                file=relative,
                in_a_row=self.refusals,
                amp_dtype=dtypes[0],
                amp_policy_dtype=dtypes[1],
            )
        )
        notice(
            f"warning: the update of round {index} was refused: {tensor} is not finite "
            f"({precision}); {advice}"
        )

    def _save(self, hub: Hub, number: int) -> None:
        """Save a checkpoint of round ``number``, unless the round has one.

        If it cannot be written, training continues, because the disk may have space for the next
        one; earlier checkpoints stay.
        """
        if self.agent is None or number == self.checkpoint_round:
            return
        keep = self.config.output.keep_checkpoints
        parts = self.trainee.parts()
        try:
            if self.directory.events.exists():
                sync(self.directory.events)
            size, identity = self.events_bytes, self.identity
            features = self.agent.policy.features
            path = save(self.directory.path, number, parts, size, keep, identity, features)
        except OSError as error:
            notice(
                f"warning: checkpoint: round {number} was not saved ({error.strerror}); "
                f"{what_stays(self.directory.path)}"
            )
            return
        self.checkpoint_round = number
        event = CheckpointSaved(time=time.time(), round=number, path=self._relative(path))
        hub.emit(event)

    def _relative(self, path: Path) -> str:
        """A path within the run directory, relative to it."""
        return str(path.relative_to(self.directory.path))
