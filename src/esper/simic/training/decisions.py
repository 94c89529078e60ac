"""Records of a policy's decisions in a step, for telemetry."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from esper.leyline.events import DecisionsMade, Event, nested_numbers, numbers
from esper.simic.actor import PolicyActor
from esper.tamiyo.baselines import Actor
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.interface import RecurrentState

DIGITS = 5
"""Decimals of a recorded probability."""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """The decisions of one step, in CPU memory; see ``Decision.stack``.

    Attributes:
        time: seconds since 1970.
        round: from 1.
        step: from 1.
        numbers: log-prob, value and, if known, the probability of each op, ``[N, 2 + ops]``.
        choices: actions and whether each op was legal, int64 ``[N, heads + ops]``.
        heads: number of columns of ``choices`` that are actions.
    """

    time: float
    round: int
    step: int
    numbers: Tensor
    choices: Tensor
    heads: int

    def events(self) -> Iterator[Event]:
        """The event that reports the decisions."""
        log_prob, value = self.numbers[:, :2].unbind(1)
        legal = self.choices[:, self.heads :].tolist()
        yield DecisionsMade(
            time=self.time,
            round=self.round,
            step=self.step,
            actions=self.choices[:, : self.heads].tolist(),
            legal_ops=[[op for op, is_legal in enumerate(row) if is_legal] for row in legal],
            op_probability=nested_numbers(self.numbers[:, 2:].round(decimals=DIGITS).tolist()),
            log_prob=numbers(log_prob.round(decimals=DIGITS).tolist()),
            value=numbers(value.round(decimals=DIGITS).tolist()),
        )


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

    def stack(self) -> list[Tensor]:
        """``numbers`` and ``choices`` of the record, on the policy's device."""
        columns = [self.log_prob[:, None], self.value[:, None]]
        if self.ops is not None:
            columns.append(self.ops())
        return [
            torch.cat([column.double() for column in columns], 1),
            torch.cat([self.actions, self.masks.ops.long()], 1),
        ]


class DecisionSource(Protocol):
    """Source of the last decision: an actor of this process, or one of another process."""

    last: Decision | None


@dataclass(slots=True)
class RemoteDecision:
    """A decision that an actor in another process made; see ``DecisionSource``."""

    last: Decision | None = None


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
