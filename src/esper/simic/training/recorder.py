"""Events and summary of a round of growth."""

import time
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.transfer import HostCopy, on_host
from esper.leyline.events import (
    CounterfactualMatrixComputed,
    DecisionsMade,
    EpisodeOutcome,
    EpisodeStarted,
    EpochCompleted,
    Event,
    GovernorRollback,
    nested_numbers,
    numbers,
)
from esper.leyline.stages import Stage
from esper.nissa.hub import Hub
from esper.simic.growth.layout import GrowthLayout
from esper.simic.growth.step import Step, StepReport, seeds_entering
from esper.simic.training.step_events import Decision, StepRecord
from esper.tolaria.governor import Reason


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """Outcome of a round: means over its environments.

    Attributes:
        round: number of the round, from 1.
        gain: test utility minus that of the never-grow twin, in points.
        validation_gain: validation utility minus that of the twin, in points.
        test_accuracy, twin_test_accuracy: committed test accuracy of the grown hosts and of their
            twins, in [0, 1].
        accuracy, twin_accuracy: the same on the validation split.
        episode_return: sum of rewards.
        added_parameters: parameters of fossilised seeds.
        germinated, fossilised, pruned: seeds per episode.
        rolled_back: rollbacks per episode.
        steps_per_second: environment steps per second, including the update.
        metrics: metrics of the update, empty without an update.
    """

    round: int
    gain: float
    validation_gain: float
    test_accuracy: float
    twin_test_accuracy: float
    accuracy: float
    twin_accuracy: float
    episode_return: float
    added_parameters: float
    germinated: float
    fossilised: float
    pruned: float
    rolled_back: float
    steps_per_second: float
    metrics: dict[str, float | None]


class Recorder:
    """Records one round of ``environment`` and emits its events.

    Args:
        hub: receives the events.
        environment: environments whose steps are recorded.
        round_number: number of the round, from 1.
    """

    def __init__(self, hub: Hub, environment: GrowthLayout, round_number: int):
        self.hub, self.environment, self.round = hub, environment, round_number
        self._rewards: list[Tensor] = []
        self._rollbacks: list[Tensor] = []
        self._twin_scores: list[Tensor] = []
        self._stages: list[tuple[Tensor, Tensor, Tensor]] = []
        self.last: Step | None = None

    def step(self, t: int, actions: Tensor, step: Step, decision: Decision | None) -> None:
        """Record step ``t`` (from 0), and the decision for its actions if it is known."""
        if self.last is None:
            self._emit_start()
        self.last = step
        report = step.report
        self._rewards.append(step.reward)
        self._rollbacks.append(report.rollback)
        self._twin_scores.append(report.twin_score)
        self._stages.append((report.before.stage, report.acted.stage, report.after.stage))
        if self.hub.wants(GovernorRollback):
            self._emit_rollbacks(t, report)
        if self.hub.wants(EpochCompleted):
            self._emit_step(t, actions, step, decision)

    @property
    def twin_scores(self) -> Tensor:
        """Score of each environment's twin after each step so far, ``[T, N]``."""
        return torch.stack(self._twin_scores)

    def _emit_step(self, t: int, actions: Tensor, step: Step, decision: Decision | None) -> None:
        """Have the events of a step made by the telemetry thread.

        On CUDA the tensors are stacked and copied behind the step's kernels, before those of the
        next step are queued, and the telemetry thread waits for the copy.
        """
        if not self.hub.wants(DecisionsMade):
            decision = None
        tensors = self.environment.environments, actions, step.reward, step.report, decision
        moment = time.time(), self.round, t + 1
        if self.environment.device.type == "cpu":
            self.hub.emit_later(lambda: StepRecord(*moment, *StepRecord.stack(*tensors)).events())
        else:
            copy = HostCopy(StepRecord.stack(*tensors))
            self.hub.emit_later(lambda: StepRecord(*moment, *copy.wait()).events())

    def _emit_start(self) -> None:
        tasks = self.environment.current_tasks
        self.hub.emit(
            EpisodeStarted(
                time=time.time(),
                round=self.round,
                task=[task.label for task in tasks],
                host_parameters=[task.host.parameter_count for task in tasks],
                draw=[task.name for task in tasks] if any(task.family for task in tasks) else [],
            )
        )

    def _emit_rollbacks(self, t: int, report: StepReport) -> None:
        copy = HostCopy([report.rollback, self.environment.environments])
        make = partial(self._rollback_events, time.time(), t, copy)
        if self.environment.device.type != "cpu":
            self.hub.emit_later(make, lossless=True)
            return
        for event in make():
            self.hub.emit(event)

    def _rollback_events(self, now: float, t: int, copy: HostCopy) -> list[Event]:
        """The event of the hosts that were rolled back in step ``t``, if there are any."""
        rollback, environments = copy.wait()
        rows = rollback.nonzero()[:, 0]
        if len(rows) == 0:
            return []
        return [
            GovernorRollback(
                time=now,
                round=self.round,
                step=t + 1,
                environment=environments[rows].tolist(),
                reason=[Reason(reason).name for reason in rollback[rows].tolist()],
            )
        ]

    def finish(self, steps_per_second: float, metrics: dict[str, float | None]) -> RoundSummary:
        """Emit the outcome of the round as an event and return its summary."""
        assert self.last is not None, "no step was recorded"
        report = self.last.report
        grown, twins = report.committed, report.twin_committed
        test, twin_test = report.test, report.twin_test
        assert grown is not None
        assert twins is not None
        assert test is not None
        assert twin_test is not None
        names = [task.label for task in self.environment.tasks]
        tasks = self.environment.task_numbers
        ends = (Stage.GERMINATED, Stage.FOSSILISED, Stage.PRUNED)
        stages = [torch.stack(parts) for parts in zip(*self._stages, strict=True)]
        germinated, fossilised, pruned = (seeds_entering(stage, *stages).sum(0) for stage in ends)
        shared = {
            "test_accuracy": test.accuracy,
            "twin_test_accuracy": twin_test.accuracy,
            "accuracy": grown.accuracy,
            "twin_accuracy": twins.accuracy,
            "episode_return": torch.stack(self._rewards).sum(0),
            "added_parameters": report.added_parameters,
            "germinated": germinated,
            "fossilised": fossilised,
            "pruned": pruned,
            "rolled_back": (torch.stack(self._rollbacks) > 0).sum(0),
        }
        measures = shared | {
            "utility": self.environment.utility(report.score, report.added_parameters),
            "twin_utility": report.twin_score,
            "expected_accuracy": grown.expected,
            "twin_expected_accuracy": twins.expected,
            "test_utility": self.environment.utility(test.expected, report.added_parameters),
            "twin_test_utility": twin_test.expected,
            "test_expected_accuracy": test.expected,
            "twin_test_expected_accuracy": twin_test.expected,
        }
        # One transfer for everything: a GPU is waited for once.
        games = [] if report.shapley is None else [report.shapley, report.interactions]
        copies = on_host(*measures.values(), *(x for x in games if x is not None))
        measures = dict(zip(measures, copies, strict=False))
        coalitions = copies[len(measures) :]
        outcome = EpisodeOutcome(
            time=time.time(),
            round=self.round,
            task=[names[task] for task in tasks],
            **{name: _list(values) for name, values in measures.items()},
        )
        self.hub.emit(outcome)
        if coalitions:
            shapley, interactions = (values.tolist() for values in coalitions)
            self.hub.emit(
                CounterfactualMatrixComputed(
                    time=time.time(),
                    round=self.round,
                    shapley=nested_numbers(shapley),
                    interactions=[nested_numbers(rows) for rows in interactions],
                )
            )
        means = {name: measures[name].double().mean().item() for name in shared}
        return RoundSummary(
            round=self.round,
            gain=fmean(outcome.gain),
            validation_gain=fmean(outcome.validation_gain),
            steps_per_second=steps_per_second,
            metrics=metrics,
            **means,
        )


def _list(values: Tensor) -> list[Any]:
    """A tensor as a list; floats are encoded as event numbers."""
    items: list[Any] = values.tolist()
    return numbers(items) if values.is_floating_point() else items
