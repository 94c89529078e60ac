"""One process of a run: rounds, updates, telemetry and checkpoints of any trainee."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from esper.leyline.config import TrainConfig, flatten
from esper.leyline.events import (
    AnalyticsSnapshot,
    PolicyUpdateCompleted,
    PPOUpdateCompleted,
    UpdateRefused,
    number,
)
from esper.leyline.metrics import Metric, part_metric
from esper.leyline.notices import notice
from esper.leyline.precision_text import precision_text
from esper.simic.distributed.cluster import ActorsLost
from esper.simic.optimizer import GROUPS
from esper.simic.ppo import PPOAgent
from esper.simic.records.record_writer import RecordWriter
from esper.simic.rollout import Rollout
from esper.simic.run.run_process import RunProcess, StopRequest
from esper.simic.training.anomaly_detector import AnomalyDetector
from esper.simic.training.gym_trainee import GymSummary
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.replay import write_refusal
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


@dataclass(slots=True, kw_only=True)
class Session(RunProcess):
    """One process of a run whose policy acts.

    Attributes:
        trainee: environments and policy.
        observer: notified of every step and round.
        checkpoint_round: round of the latest checkpoint, None if there is none.
        records: writes the rollouts of rounds; None if they are not recorded.
        events_bytes: length of the event lines at the end of the last round.
        refusals: number of updates in a row that were refused.
        detector: detects anomalies in learning.
    """

    trainee: Trainee
    observer: Observer
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

    def run(self) -> list[Any]:
        """Run the rounds after ``done`` to the total; returns their summaries."""
        total, every = self.config.world.rounds, self.config.output.checkpoint_every
        summaries: list[Any] = []
        with self.telemetry(self.config.output):
            self._announce()
            try:
                for number in range(self.done + 1, total + 1):
                    self.stop.check()
                    summaries.append(self._round(number))
                    self.done = number
                    if self.trainee.best:
                        self._write_checkpoint(best=True)
                    if number % every == 0 or number == total or self.trainee.at_goal:
                        self._save()
                    # After saving, so that a reported round is not lost if the process dies.
                    self.observer.round_done(summaries[-1])
                    if self.refusals == MAX_REFUSALS:
                        raise _Refusal
                    if self.trainee.at_goal:
                        break
            except StopRequest:
                self.interrupt()
                # Incomplete rollouts are discarded: weights are those of the last complete round.
                self._save()
            except _Refusal as error:
                self.fail(str(error))
                self._save()
            except ActorsLost as error:
                self.fail(f"ray: {error}, so the run stops; --resume continues its checkpoint")
                self._save()
            if self.agent is not None and self.checkpoint_round != self.done:
                self.fail()
        return summaries

    def _announce(self) -> None:
        self.hub.emit(self.trainee.start_event(self.done))
        self._note_events()
        self.observer.started(self.directory.path, self.config, self.done, self.trainee.steps)

    def _note_events(self) -> None:
        """Record the length of the event file at the end of a round."""
        self.hub.flush()
        self.events_bytes = self.directory.events_length()

    def _round(self, index: int) -> Any:
        def on_step(step: AnyStep) -> None:
            self.observer.stepped(step)
            if not step.done:
                self.stop.check()

        begin = time.perf_counter()
        rollout = self.trainee.collect(self.hub, index, on_step)
        collect_end = time.perf_counter()
        self._record(index, rollout)
        record_end = time.perf_counter()
        metrics: dict[str, float | None] = self.agent.update(rollout) if self.agent else {}
        end = time.perf_counter()

        speed = self.trainee.count * self.trainee.steps / (end - begin)
        update = self._update_completed(index, metrics) if self.agent else None
        snapshot = self._snapshot(index, metrics, speed, collect_end - begin, end - record_end)
        if update is not None:
            self.hub.emit(update)
            self._note_refusal(index)
        self.hub.emit(snapshot)
        for anomaly in self.detector.observe(update, snapshot):
            self.hub.emit(anomaly)
        summary = self.trainee.finish(self.hub, index, speed, metrics)
        self._note_events()
        return summary

    def _record(self, index: int, rollout: Rollout[Any]) -> None:
        """Write the record of a round, before a checkpoint can say that the round is done."""
        if self.records is None:
            return
        self.records.write(self.trainee.record(index, rollout))

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

    def _note_refusal(self, index: int) -> None:
        """Report a refused update, and write the file from which it can be replayed."""
        assert self.agent is not None
        if self.agent.refusal is None:
            self.refusals = 0
            return
        self.refusals += 1
        try:
            path = write_refusal(self.directory.path, index, self.agent, flatten(self.config))
            relative = str(path.relative_to(self.directory.path))
            advice = f"esper replay {path} repeats it"
        except OSError as error:
            relative, advice = "", f"the file that repeats it was not written ({error.strerror})"
        tensor = self.agent.refusal.tensor
        dtypes = self.trainee.precision.dtype_name, self.agent.policy.amp_dtype_name
        precision = precision_text(*dtypes)
        self.hub.emit(
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

    def _save(self) -> None:
        """Save a checkpoint of the last complete round, unless it has one.

        If it cannot be written, training continues, because the disk may have space for the next
        one.
        """
        if self.agent is None or self.done == self.checkpoint_round:
            return
        if self._write_checkpoint():
            self.checkpoint_round = self.done

    def _write_checkpoint(self, best: bool = False) -> bool:
        """Write the last complete round, as the best one if ``best``; whether that worked."""
        assert self.agent is not None, "only a learned policy is saved"
        parts, keep = self.trainee.parts(), self.config.output.keep_checkpoints
        features, events = self.agent.policy.features, self.events_bytes
        return self.save_checkpoint("round", self.done, parts, events, keep, features, best)
