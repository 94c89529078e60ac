"""One process of a run that learns from records: epochs, telemetry and checkpoints."""

import math
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from esper.leyline.config import TrainConfig
from esper.leyline.config.offline import ImitationConfig
from esper.leyline.events import SCHEMA_VERSION, PolicyUpdateCompleted, TrainingStarted, number
from esper.leyline.metrics import Metric
from esper.simic.offline.batches import EpisodeLoader, epoch_order
from esper.simic.offline.methods import method_of
from esper.simic.offline.recorded_data import RecordedData
from esper.simic.run.run_directory import RunDirectory
from esper.simic.run.run_process import RunProcess, StopRequest
from esper.simic.trainer import Batch, Trainer
from esper.simic.update_metrics import Metrics, metrics_table

HELD_OUT = {
    Metric.POLICY_LOSS: Metric.HELD_OUT_POLICY_LOSS,
    Metric.VALUE_LOSS: Metric.HELD_OUT_VALUE_LOSS,
    Metric.NEGATIVE_LOG_LIKELIHOOD: Metric.HELD_OUT_NEGATIVE_LOG_LIKELIHOOD,
    Metric.EXPECTED_GAIN: Metric.HELD_OUT_EXPECTED_GAIN,
}
"""Metrics that are also measured on the held-out episodes, where the method has them, and their
names there."""


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """Outcome of an epoch.

    Attributes:
        epoch: number of the epoch, from 1.
        metrics: metrics by name, means over the steps of the epoch; the held-out ones after it.
        best: whether its policy is the one to keep so far.
        steps_per_second: recorded steps learned from per second, without the held-out episodes.
    """

    epoch: int
    metrics: dict[str, float | None]
    best: bool
    steps_per_second: float


class OfflineObserver(Protocol):
    """Is notified of the progress of learning."""

    def started(self, directory: RunDirectory, data: RecordedData, done: int, total: int) -> None:
        """Called when learning begins; earlier processes completed ``done`` epochs of ``total``."""
        ...

    def epoch_done(self, summary: EpochSummary) -> None:
        """Called after every epoch, after its checkpoint if it is the best so far."""
        ...


@dataclass(slots=True, kw_only=True)
class OfflineSession(RunProcess):
    """One process of a run that learns from records.

    Attributes:
        config: settings of learning.
        settings: settings of the run, see ``policy_config``.
        data: what is learned from.
        trainer: learns.
        observer: notified of every epoch.
        best: the best epoch so far and its loss; 0 and infinity before the first.
        save_failure: whether the best epoch could not be saved.
    """

    config: ImitationConfig
    settings: TrainConfig
    data: RecordedData
    trainer: Trainer
    observer: OfflineObserver
    best: tuple[int, float] = (0, math.inf)
    save_failure: bool = False

    @property
    def selects(self) -> bool:
        """Whether the held-out loss decides which epoch is kept.

        The loss of V-trace does not measure how good a policy is: its last epoch is kept.
        """
        return len(self.data.held_out) > 0 and method_of(self.config) != "vtrace"

    @property
    def whole_groups(self) -> bool:
        """Whether the method compares the episodes of a group."""
        return method_of(self.config) == "vine"

    def run(self) -> list[EpochSummary]:
        """Learn from epoch ``done + 1`` on; returns the summaries."""
        summaries: list[EpochSummary] = []
        loader = EpisodeLoader(self.data.episodes, self.data.returns, self.trainer.device)
        with self.telemetry(self.settings.output):
            self.hub.emit(self._start())
            self.observer.started(self.directory, self.data, self.done, self.config.epochs)
            try:
                for epoch in range(self.done + 1, self.config.epochs + 1):
                    summaries.append(self._epoch(loader, epoch))
                    self.done = epoch
                    self._finish_epoch(summaries[-1])
                    if summaries[-1].metrics[Metric.REFUSED]:
                        best = self.best[0]
                        what = f"the best epoch, {best}, is kept" if best else "no epoch is kept"
                        self.fail(
                            f"epoch {epoch} produced non-finite values, so learning stops; {what}"
                        )
                        break
                    if self.selects and epoch - self.best[0] >= self.config.patience:
                        break
            except StopRequest:
                self.interrupt()
            if self.save_failure and not self.code:
                self.fail()
        return summaries

    def _start(self) -> TrainingStarted:
        world = self.settings.world
        return TrainingStarted(
            time=time.time(),
            schema=SCHEMA_VERSION,
            round=self.done,
            rounds=self.config.epochs,
            tasks=list(dict.fromkeys(self.data.episodes.tasks)),
            policy=self.settings.method.algorithm,
            envs=0,
            group_size=world.group_size,
            episode_length=len(self.data.returns),
            slots=[],
            host_parameters=[],
            device=self.config.device,
            amp_enabled=False,
            amp_policy_dtype=self.trainer.policy.amp_dtype_name,
            level=self.config.telemetry_level,
        )

    def _epoch(self, loader: EpisodeLoader, epoch: int) -> EpochSummary:
        """Learn for one epoch."""
        begin = time.perf_counter()
        order = epoch_order(self.data.training, self.config.seed, epoch)
        batches = []
        for batch in loader.batches(order, self.config.batch_size, self.whole_groups):
            self.stop.check()
            batches.append((self.trainer.step(batch), _steps(batch)))
        # The only transfers of an epoch; they also wait for the device, so that the time is right.
        metrics = averages(batches, self.trainer.policy.heads)
        # The last step is followed by no loss that would show what it did to the weights.
        if not self.trainer.optimizer.finite():
            metrics[Metric.REFUSED] = 1.0
        metrics[Metric.LEARNING_RATE] = self.config.learning_rate
        speed = self.data.steps / (time.perf_counter() - begin)
        if self.trainer.scaler is not None:
            metrics[Metric.AMP_SCALE] = float(self.trainer.scaler.scale)
        if len(self.data.held_out) > 0:
            metrics |= self._held_out(loader)
        loss = metrics.get(Metric.HELD_OUT_POLICY_LOSS) if self.selects else None
        best = loss is None or loss < self.best[1]
        best = best and not metrics[Metric.REFUSED]
        if best:
            self.best = epoch, math.inf if loss is None else loss
        return EpochSummary(epoch, metrics, best, speed)

    def _held_out(self, loader: EpisodeLoader) -> dict[str, float | None]:
        """Metrics of the held-out episodes."""
        batches = []
        size = self.config.batch_size
        for batch in loader.batches(self.data.held_out, size, self.whole_groups):
            values = self.trainer.measure(batch)
            shared_metrics = {name: value for name, value in values.items() if name in HELD_OUT}
            batches.append((shared_metrics, _steps(batch)))
        metrics = averages(batches, self.trainer.policy.heads)
        return {HELD_OUT[name]: value for name, value in metrics.items()}

    def _finish_epoch(self, summary: EpochSummary) -> None:
        """Emit the epoch's event, save its policy if it is the best, and tell the observer."""
        numbers = {n: None if v is None else number(v) for n, v in summary.metrics.items()}
        epoch = summary.epoch
        now = time.time()
        self.hub.emit(PolicyUpdateCompleted(time=now, round=epoch, update=epoch, metrics=numbers))
        if summary.best:
            self._save(epoch)
        self.observer.epoch_done(summary)

    def _save(self, epoch: int) -> None:
        """Save the best epoch so far."""
        self.hub.flush()
        parts = self.trainer.state()
        parts["counters"]["held_out_loss"] = torch.tensor(self.best[1], dtype=torch.float64)
        length, keep = self.directory.events_length(), self.config.keep_checkpoints
        features = self.trainer.policy.features
        self.save_failure = not self.save_checkpoint("epoch", epoch, parts, length, keep, features)


def _steps(batch: Batch) -> float:
    """Number of recorded steps in a batch on the CPU."""
    return float(batch.weight.sum())


def averages(
    minibatches: list[tuple[Metrics, float]], heads: tuple[str, ...]
) -> dict[str, float | None]:
    """Weighted means of the metrics of minibatches by name; one transfer from the device.

    Args:
        minibatches: metrics and weight of each minibatch.
        heads: names of the action heads, for metrics of shape ``[heads]``.
    """
    names, missing, table = metrics_table([metrics for metrics, _ in minibatches], heads)
    table = table.cpu()
    weights = table.new_tensor([weight for _, weight in minibatches])
    means = (weights @ table / weights.sum()).tolist()
    return dict.fromkeys(missing) | dict(zip(names, means, strict=True))
