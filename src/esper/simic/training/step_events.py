"""The events of one environment step, built from tensors in the telemetry thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, HEADS
from esper.leyline.events import (
    DecisionsMade,
    EpochCompleted,
    Event,
    SeedContributions,
    SeedFossilized,
    SeedGerminated,
    SeedPruned,
    SeedSignalsMeasured,
    SeedStageChanged,
    nested_numbers,
    numbers,
)
from esper.leyline.stages import Stage
from esper.simic.actor import PolicyActor
from esper.simic.growth.step import StepReport
from esper.tamiyo.baselines import Actor
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.interface import RecurrentState

_FLOATS = {
    "train_loss": attrgetter("train_loss"),
    "train_accuracy": attrgetter("train_accuracy"),
    "validation_loss": attrgetter("scores.loss"),
    "validation_accuracy": attrgetter("scores.accuracy"),
    "expected_accuracy": attrgetter("scores.expected"),
    "twin_validation_accuracy": attrgetter("twin_scores.accuracy"),
    "twin_expected_accuracy": attrgetter("twin_scores.expected"),
}
"""Getters of fields of ``EpochCompleted`` from a ``StepReport``, by field name."""

_DIGITS = 6
"""Decimals of floats in events: about the precision of float32, in half the bytes."""

_DECISION_DIGITS = 5
"""Decimals of recorded probabilities and values."""

CONTRIBUTION_STRIDE = 4
"""Steps between two records of contributions: all of them would be as long as the step itself."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decisions of one step, on the policy's device.

    Attributes:
        masks: masks of the legal actions.
        actions, log_prob, value: see ``Actor.act``.
        ops: computes the probability of each op, ``[N, ops]``; None if the actor has none.
    """

    masks: ActionMasks
    actions: Tensor
    log_prob: Tensor
    value: Tensor
    ops: Callable[[], Tensor] | None


class WatchedActor:
    """Wraps an actor and keeps its last decision; does not change its actions.

    Attributes:
        last: the last decision, None before the first.
    """

    def __init__(self, actor: Actor):
        self.actor = actor
        self.last: Decision | None = None
        self._ops: Callable[[RecurrentState, ActionMasks], Tensor] | None = None

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``Actor.begin``. Copies the weights from which op probabilities are computed."""
        self.actor.begin(environments, episode)
        if isinstance(self.actor, PolicyActor) and isinstance(self.actor.policy, FactoredLSTM):
            self._ops = self.actor.policy.op_probability_function()

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Actor.act``."""
        choice, masks = self.actor.act(observation, step), observation.masks
        ops = None
        if isinstance(self.actor, PolicyActor) and self._ops is not None:
            ops = partial(self._ops, self.actor.hidden, masks)
        self.last = Decision(masks, *choice, ops)
        return choice


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The recorded tensors of one step, in CPU memory; see ``stack``.

    Attributes:
        time: seconds since 1970.
        round, step: from 1.
        environments: identities of the environments, int64 ``[N]``.
        floats: the fields of ``_FLOATS`` and the reward, float64 ``[F + 1, N]``.
        integers: added parameters, op, slot, success, int64 ``[4, N]``.
        stages: stages before the action, after it and after the tick, int64 ``[3, N, S]``.
        seeds: blueprints before and after the action, parameters after the tick, int64
            ``[3, N, S]``.
        signals: alpha, contribution, gradient norm, gradient health, float64 ``[4, N, S]``.
        decisions: log-prob, value and, if known, the probability of each op, float64
            ``[N, 2 + ops]``; None without decisions.
        choices: actions and whether each op was legal, int64 ``[N, heads + ops]``.
    """

    time: float
    round: int
    step: int
    environments: Tensor
    floats: Tensor
    integers: Tensor
    stages: Tensor
    seeds: Tensor
    signals: Tensor
    decisions: Tensor | None = None
    choices: Tensor | None = None

    @staticmethod
    def stack(
        identities: Tensor,
        actions: Tensor,
        reward: Tensor,
        report: StepReport,
        decision: Decision | None,
    ) -> list[Tensor]:
        """The recorded tensors on the device of the step, in the order of the fields."""
        before, action, after = report.before, report.acted, report.after
        signals = report.signals
        floats = [*(of(report) for of in _FLOATS.values()), reward]
        op, slot = (actions[:, HEADS.index(head)] for head in ("op", "slot"))
        measures = [after.alpha, signals.contribution, signals.gradient_norm, signals.health]
        tensors = [
            identities,
            torch.stack([x.double() for x in floats]),
            torch.stack([report.added_parameters, op, slot, report.success.long()]),
            torch.stack([before.stage, action.stage, after.stage]),
            torch.stack([before.blueprint, action.blueprint, report.seed_parameters]),
            torch.stack(measures).double(),
        ]
        if decision is not None:
            columns = [decision.log_prob[:, None], decision.value[:, None]]
            if decision.ops is not None:
                columns.append(decision.ops())
            tensors.append(torch.cat([column.double() for column in columns], 1))
            tensors.append(torch.cat([decision.actions, decision.masks.ops.long()], 1))
        return tensors

    @property
    def _moment(self) -> dict[str, Any]:
        return {"time": self.time, "round": self.round, "step": self.step}

    def events(self) -> Iterator[Event]:
        """The events of the step, in the order in which they occurred."""
        if self.decisions is not None and self.choices is not None:
            yield self._decision_event(self.decisions, self.choices)
        yield from self._changes(self.stages[0], self.stages[1])
        yield self._epoch()
        yield from self._contributions()
        yield SeedSignalsMeasured(
            **self._moment,
            contribution=nested_numbers(self.signals[1].tolist()),
            gradient_norm=nested_numbers(self.signals[2].tolist()),
            gradient_health=nested_numbers(self.signals[3].tolist()),
        )
        yield from self._changes(self.stages[1], self.stages[2])

    def _decision_event(self, decisions: Tensor, choices: Tensor) -> DecisionsMade:
        values = decisions.round(decimals=_DECISION_DIGITS)
        actions, legal = (part.tolist() for part in choices.tensor_split([len(HEADS)], 1))
        return DecisionsMade(
            **self._moment,
            actions=actions,
            legal_ops=[[op for op, is_legal in enumerate(row) if is_legal] for row in legal],
            op_probability=nested_numbers(values[:, 2:].tolist()),
            log_prob=numbers(values[:, 0].tolist()),
            value=numbers(values[:, 1].tolist()),
        )

    def _contributions(self) -> Iterator[Event]:
        """Contributions of the seeds that act; rarely, because most lines of a run are steps."""
        contribution = self.signals[1]
        acting = contribution.isfinite()
        if self.step % CONTRIBUTION_STRIDE or not bool(acting.any()):
            return
        rows, slots = acting.nonzero().unbind(1)
        yield SeedContributions(
            **self._moment,
            environment=self.environments[rows].tolist(),
            slot=slots.tolist(),
            contribution=numbers(contribution[acting].round(decimals=4).tolist()),
        )

    def _epoch(self) -> EpochCompleted:
        growth, op, slot, success = self.integers.tolist()
        rows = map(numbers, self.floats.round(decimals=_DIGITS).tolist())
        columns: dict[str, Any] = dict(zip((*_FLOATS, "reward"), rows, strict=True))
        stage = self.stages[2]
        return EpochCompleted(
            **self._moment,
            added_parameters=growth,
            op=op,
            slot=slot,
            success=[bool(value) for value in success],
            stage=stage.tolist(),
            blueprint=torch.where(stage <= Stage.DORMANT, 0, self.seeds[1]).tolist(),
            alpha=nested_numbers(self.signals[0].round(decimals=_DIGITS).tolist()),
            **columns,
        )

    def _changes(self, before: Tensor, after: Tensor) -> Iterator[Event]:
        """Events of the slots whose stage changed; an emptied slot has its former blueprint."""
        rows, slots = (before != after).nonzero().unbind(1)
        if len(rows) == 0:
            return
        was, now = before[rows, slots], after[rows, slots]
        old, new, parameters = self.seeds[:, rows, slots]
        kinds = torch.where(new > 0, new, old)

        def about(where: Tensor) -> dict[str, Any]:
            return self._moment | {
                "environment": self.environments[rows[where]].tolist(),
                "slot": slots[where].tolist(),
                "blueprint": [BLUEPRINTS[kind] for kind in kinds[where].tolist()],
            }

        yield SeedStageChanged(
            **about(torch.ones_like(was, dtype=torch.bool)),
            previous=[Stage(stage).name for stage in was.tolist()],
            stage=[Stage(stage).name for stage in now.tolist()],
        )
        for stage, kind in ((Stage.GERMINATED, SeedGerminated), (Stage.PRUNED, SeedPruned)):
            if bool((now == stage).any()):
                yield kind(**about(now == stage))
        mask = now == Stage.FOSSILISED
        if bool(mask.any()):
            yield SeedFossilized(**about(mask), parameters=parameters[mask].tolist())
