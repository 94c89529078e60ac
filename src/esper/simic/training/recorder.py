"""Turning what happened in a round into events and into a summary."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.events import EpisodeOutcome, EpochCompleted, numbers
from esper.leyline.stages import Stage
from esper.nissa.hub import Hub
from esper.simic.environment import GrowthEnv, Step
from esper.simic.training.step_events import StepRecord


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """What came of a round, means over its environments.

    Attributes:
        round: its number, from 1.
        accuracy: committed validation accuracy of the grown hosts.
        twin_accuracy: of their never-grow twins.
        episode_return: sum of rewards.
        added_parameters: in fossilised seeds.
        germinated, fossilised, pruned: seeds an episode.
        steps_per_second: environment steps a second, update included.
        metrics: of the update, empty without one.
    """

    round: int
    accuracy: float
    twin_accuracy: float
    episode_return: float
    added_parameters: float
    germinated: float
    fossilised: float
    pruned: float
    steps_per_second: float
    metrics: dict[str, float]

    @property
    def gain(self) -> float:
        """Committed accuracy above the twin's."""
        return self.accuracy - self.twin_accuracy


class Recorder:
    """Follows one round of ``environment`` and tells the hub.

    Args:
        hub: where events go.
        environment: whose steps these are.
        round_number: from 1.
    """

    def __init__(self, hub: Hub, environment: GrowthEnv, round_number: int):
        self.hub, self.environment, self.round = hub, environment, round_number
        count, device = environment.count, environment.device
        self.returns = torch.zeros(count, device=device)
        self.tally = torch.zeros(3, count, dtype=torch.long, device=device)
        self.last: Step | None = None

    def step(self, t: int, actions: Tensor, step: Step) -> None:
        """Take in step ``t`` (from 0)."""
        self.last = step
        report = step.report
        self.returns += step.reward.to(self.returns.dtype)
        changes = [(report.before, report.acted), (report.acted, report.after)]
        entered = [
            torch.stack([((a.stage != b.stage) & (b.stage == stage)).sum(1) for a, b in changes])
            for stage in (Stage.GERMINATED, Stage.FOSSILISED, Stage.PRUNED)
        ]
        self.tally += torch.stack(entered).sum(1)
        if self.hub.wants(EpochCompleted):
            record = StepRecord.take(time.time(), self.round, t, self.environment, actions, step)
            self.hub.emit_later(record.events)

    def finish(self, steps_per_second: float, metrics: dict[str, float]) -> RoundSummary:
        """The round is over: its outcome as an event and as a summary."""
        assert self.last is not None, "no step was recorded"
        report = self.last.report
        committed = report.measurement.committed
        assert committed is not None, "the last step of an episode measures what is committed"
        count, twins = self.environment.count, self.environment.twin_of
        accuracy, expected = committed.accuracy[:count], committed.expected[:count]
        twin_accuracy = committed.accuracy[count:][twins]
        germinated, fossilised, pruned = self.tally
        self.hub.emit(
            EpisodeOutcome(
                time=time.time(),
                round=self.round,
                accuracy=numbers(accuracy.tolist()),
                twin_accuracy=numbers(twin_accuracy.tolist()),
                expected_accuracy=numbers(expected.tolist()),
                twin_expected_accuracy=numbers(committed.expected[count:][twins].tolist()),
                episode_return=numbers(self.returns.tolist()),
                added_parameters=report.added.tolist(),
                germinated=germinated.tolist(),
                fossilised=fossilised.tolist(),
                pruned=pruned.tolist(),
            )
        )

        def mean(x: Tensor) -> float:
            return x.double().mean().item()

        return RoundSummary(
            round=self.round,
            accuracy=mean(accuracy),
            twin_accuracy=mean(twin_accuracy),
            episode_return=mean(self.returns),
            added_parameters=mean(report.added),
            germinated=mean(germinated),
            fossilised=mean(fossilised),
            pruned=mean(pruned),
            steps_per_second=steps_per_second,
            metrics=metrics,
        )
