"""What a policy decided in a step, for telemetry."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.events import DecisionsMade, Event, nested_numbers, numbers
from esper.simic.rollout import Actor
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation

DIGITS = 5
"""Digits of a probability that are told."""


@runtime_checkable
class TellsProbabilities(Protocol):
    """An actor that knows how probable each operation was."""

    def op_probabilities(self, masks: ActionMasks) -> Tensor:
        """Of the step it acted in last, ``[N, ops]``."""
        ...


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """The decisions of one step, on the host.

    Attributes:
        time: seconds since 1970.
        round: from 1.
        step: from 1.
        numbers: log-prob, value, and the probability of each op where it is known, ``[N, ...]``.
        choices: actions and which ops were legal, int64 ``[N, heads + ops]``.
        heads: how many columns of ``choices`` are actions.
    """

    time: float
    round: int
    step: int
    numbers: Tensor
    choices: Tensor
    heads: int

    def events(self) -> Iterator[Event]:
        """One event."""
        log_prob, value = self.numbers[:, :2].unbind(1)
        legal = self.choices[:, self.heads :].tolist()
        yield DecisionsMade(
            time=self.time,
            round=self.round,
            step=self.step,
            actions=self.choices[:, : self.heads].tolist(),
            legal_ops=[[op for op, may in enumerate(row) if may] for row in legal],
            op_probability=nested_numbers(self.numbers[:, 2:].round(decimals=DIGITS).tolist()),
            log_prob=numbers(log_prob.round(decimals=DIGITS).tolist()),
            value=numbers(value.round(decimals=DIGITS).tolist()),
        )


class WatchedActor:
    """An actor whose last decision can be told. It decides as ``actor`` does."""

    def __init__(self, actor: Actor):
        self.actor = actor
        self._seen: tuple[ActionMasks, Tensor, Tensor, Tensor] | None = None

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``Actor.begin``."""
        self.actor.begin(environments, episode)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Actor.act``."""
        chosen = self.actor.act(observation, step)
        self._seen = (observation.masks, *chosen)
        return chosen

    def record(self, time: float, round_number: int, t: int) -> DecisionRecord:
        """The decisions of step ``t`` (from 0), which was the last; two transfers."""
        assert self._seen is not None, "nothing was decided yet"
        masks, actions, log_prob, value = self._seen
        columns = [log_prob[:, None], value[:, None]]
        if isinstance(self.actor, TellsProbabilities):
            columns.append(self.actor.op_probabilities(masks))
        return DecisionRecord(
            time,
            round_number,
            t + 1,
            torch.cat([column.double() for column in columns], 1).cpu(),
            torch.cat([actions, masks.ops.long()], 1).cpu(),
            actions.shape[1],
        )
