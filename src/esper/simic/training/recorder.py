"""Turning what happened in a round into events and into a summary."""

import time
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from esper.leyline.events import (
    CounterfactualMatrixComputed,
    DecisionsMade,
    EpisodeOutcome,
    EpisodeStarted,
    EpochCompleted,
    GovernorRollback,
    nested_numbers,
    numbers,
)
from esper.leyline.stages import Stage
from esper.nissa.hub import Hub
from esper.simic.environment import GrowthEnv
from esper.simic.rewards import utility
from esper.simic.step import Step, StepReport
from esper.simic.training.decisions import WatchedActor
from esper.simic.training.step_events import StepRecord
from esper.tolaria.governor import Reason


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """What came of a round, means over its environments.

    Attributes:
        round: its number, from 1.
        accuracy: committed validation accuracy of the grown hosts.
        twin_accuracy: of their never-grow twins.
        utility_gain: utility above the twin's, see ``simic.rewards.utility``.
        episode_return: sum of rewards.
        added_parameters: in fossilised seeds.
        germinated, fossilised, pruned: seeds an episode.
        rolled_back: how often the governor put a host back, an episode.
        steps_per_second: environment steps a second, update included.
        metrics: of the update, empty without one.
    """

    round: int
    accuracy: float
    twin_accuracy: float
    utility_gain: float
    episode_return: float
    added_parameters: float
    germinated: float
    fossilised: float
    pruned: float
    rolled_back: float
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
        actor: whose decisions these are; None leaves them untold.
    """

    def __init__(
        self,
        hub: Hub,
        environment: GrowthEnv,
        round_number: int,
        actor: WatchedActor | None = None,
    ):
        self.hub, self.environment, self.round = hub, environment, round_number
        self.actor = actor
        count, device = environment.count, environment.device
        self.returns = torch.zeros(count, device=device)
        self.rolled_back = torch.zeros(count, dtype=torch.long, device=device)
        self.tally = torch.zeros(3, count, dtype=torch.long, device=device)
        self.last: Step | None = None

    def step(self, t: int, actions: Tensor, step: Step) -> None:
        """Take in step ``t`` (from 0)."""
        if self.last is None:
            self._tell_start()
        self.last = step
        report = step.report
        self.returns += step.reward.to(self.returns.dtype)
        ends = (Stage.GERMINATED, Stage.FOSSILISED, Stage.PRUNED)
        self.tally += torch.stack([report.entered(stage) for stage in ends])
        self.rolled_back += report.rollback > 0
        if self.hub.wants(GovernorRollback):
            self._tell_rollbacks(t, report)
        if self.hub.wants(EpochCompleted):
            identities = self.environment.environments
            now = time.time()
            record = StepRecord.take(now, self.round, t, identities, actions, step)
            makings = [record.events]
            if self.actor is not None and self.hub.wants(DecisionsMade):
                makings.insert(0, self.actor.record(now, self.round, t).events)
            self.hub.emit_later(lambda: chain.from_iterable(make() for make in makings))

    def _tell_start(self) -> None:
        tasks = [self.environment.tasks[i] for i in self.environment.task_of.tolist()]
        self.hub.emit(
            EpisodeStarted(
                time=time.time(),
                round=self.round,
                task=[task.name for task in tasks],
                host_parameters=[task.host.parameter_count for task in tasks],
            )
        )

    def _tell_rollbacks(self, t: int, report: StepReport) -> None:
        rows = report.rollback.nonzero()[:, 0]
        if len(rows) == 0:
            return
        reasons = report.rollback[rows].tolist()
        self.hub.emit(
            GovernorRollback(
                time=time.time(),
                round=self.round,
                step=t + 1,
                environment=self.environment.environments[rows].tolist(),
                reason=[Reason(reason).name for reason in reasons],
            )
        )

    def finish(self, steps_per_second: float, metrics: dict[str, float]) -> RoundSummary:
        """The round is over: its outcome as an event and as a summary."""
        assert self.last is not None, "no step was recorded"
        report = self.last.report
        committed, twins = report.committed, report.twin_committed
        assert committed is not None
        assert twins is not None
        names = [task.name for task in self.environment.tasks]
        tasks = self.environment.task_of.tolist()
        hosts = torch.tensor([task.host.parameter_count for task in self.environment.tasks])
        worth = utility(report.score, report.added, hosts.to(report.added.device)[tasks])
        germinated, fossilised, pruned = self.tally
        self.hub.emit(
            EpisodeOutcome(
                time=time.time(),
                round=self.round,
                task=[names[task] for task in tasks],
                utility=numbers(worth.tolist()),
                twin_utility=numbers(report.twin_score.tolist()),
                accuracy=numbers(committed.accuracy.tolist()),
                twin_accuracy=numbers(twins.accuracy.tolist()),
                expected_accuracy=numbers(committed.expected.tolist()),
                twin_expected_accuracy=numbers(twins.expected.tolist()),
                episode_return=numbers(self.returns.tolist()),
                added_parameters=report.added.tolist(),
                germinated=germinated.tolist(),
                fossilised=fossilised.tolist(),
                pruned=pruned.tolist(),
                rolled_back=self.rolled_back.tolist(),
            )
        )
        if report.shapley is not None and report.interactions is not None:
            self.hub.emit(
                CounterfactualMatrixComputed(
                    time=time.time(),
                    round=self.round,
                    shapley=nested_numbers(report.shapley.tolist()),
                    interactions=[nested_numbers(rows) for rows in report.interactions.tolist()],
                )
            )

        def mean(x: Tensor) -> float:
            return x.double().mean().item()

        return RoundSummary(
            round=self.round,
            accuracy=mean(committed.accuracy),
            twin_accuracy=mean(twins.accuracy),
            utility_gain=mean(worth - report.twin_score),
            episode_return=mean(self.returns),
            added_parameters=mean(report.added),
            germinated=mean(germinated),
            fossilised=mean(fossilised),
            pruned=mean(pruned),
            rolled_back=mean(self.rolled_back),
            steps_per_second=steps_per_second,
            metrics=metrics,
        )
