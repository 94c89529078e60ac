"""Sequences of a rollout, over which the LSTM runs in one call, never a loop over time."""

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from esper.kasmina.transfer import moved
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.interface import ObservationT, RecurrentState, inputs_from, named_inputs


@dataclass(frozen=True, slots=True)
class Sequences(Generic[ObservationT]):
    """Whole sequences, stacked along the second axis; leading axes ``[L, M]``.

    Attributes:
        observation: normalised.
        actions: int64 ``[L, M, heads]``.
        old_log_prob: of the actions when they were taken.
        advantages: normalised.
        targets: what the critic learns, normalised.
        hidden: of the memory before each sequence, ``[layers, M, width]``.
        weight: 1 where there is a step to learn from, 0 in padding; None where there is no padding.
        lengths: steps of each sequence, int64 ``[M]`` on the CPU; None where all are ``L``.
    """

    observation: ObservationT
    actions: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    targets: Tensor
    hidden: RecurrentState
    weight: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.actions.shape[1]

    def pick(self, chosen: Tensor) -> "Sequences[ObservationT]":
        """The sequences ``chosen``, int64 ``[m]``, as long as the longest of them."""
        length = self.actions.shape[0]
        if self.lengths is not None:
            length = int(self.lengths[chosen].max())
        index = moved(chosen, self.actions.device)

        def part(x: Tensor) -> Tensor:
            return x[:length].index_select(1, index)

        tensors = {name: part(x) for name, x in self.observation.tensors().items()}
        return Sequences(
            type(self.observation).from_tensors(tensors),
            part(self.actions),
            part(self.old_log_prob),
            part(self.advantages),
            part(self.targets),
            tuple(state.index_select(1, index) for state in self.hidden),
            None if self.weight is None else part(self.weight),
            None if self.lengths is None else self.lengths[chosen],
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors an update computes with, by name."""
        named = named_inputs(self.observation, self.hidden) | {
            "actions": self.actions,
            "log_prob": self.old_log_prob,
            "advantage": self.advantages,
            "target": self.targets,
        }
        return named if self.weight is None else named | {"weight": self.weight}

    @classmethod
    def from_tensors(
        cls, kind: type[ObservationT], tensors: dict[str, Tensor]
    ) -> "Sequences[ObservationT]":
        """The inverse of ``tensors``, without lengths; ``kind`` is that of the observations."""
        observation, hidden = inputs_from(kind, tensors)
        return cls(
            observation,
            tensors["actions"],
            tensors["log_prob"],
            tensors["advantage"],
            tensors["target"],
            hidden,
            tensors.get("weight"),
        )


def segments(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the unbroken runs of ``valid [T, N]`` (bool, on the CPU) lie.

    Returns:
        first step, environment and length of each run, int64 ``[M]``, by environment.
    """
    edge = torch.zeros_like(valid[:1])
    before = torch.cat([edge, valid[:-1]])
    after = torch.cat([valid[1:], edge])
    environment, first = (valid & ~before).T.nonzero(as_tuple=True)
    last = (valid & ~after).T.nonzero(as_tuple=True)[1]
    return first, environment, last - first + 1


def split_sequences(
    rollout: Rollout[ObservationT], observation: ObservationT, advantages: Tensor, targets: Tensor
) -> Sequences[ObservationT]:
    """The sequences of a rollout.

    Whole episodes side by side are sequences as they are. Where episodes begin and end within the
    rollout, each piece of one becomes a sequence of its own, padded to the longest: a piece that
    begins with the rollout goes on from the memory's state then, others from zeros.

    Args:
        rollout: what was collected.
        observation: its observations, normalised.
        advantages, targets: ``[T, N]``, normalised.
    """
    if rollout.valid is None:
        return Sequences(
            observation,
            rollout.actions,
            rollout.log_prob,
            advantages,
            targets,
            rollout.hidden,
        )
    first, environment, lengths = segments(rollout.valid)
    steps = torch.arange(int(lengths.max()))[:, None]
    inside = steps < lengths
    device = rollout.actions.device
    time = moved(torch.where(inside, first + steps, first), device)
    environment = moved(environment, device)
    weight = moved(inside, device)
    goes_on = moved(first == 0, device)[:, None]

    def part(x: Tensor) -> Tensor:
        return x[time, environment]

    tensors = {name: part(x) for name, x in observation.tensors().items()}
    return Sequences(
        type(observation).from_tensors(tensors),
        part(rollout.actions),
        part(rollout.log_prob),
        part(advantages),
        part(targets),
        tuple(torch.where(goes_on, h[:, environment], 0.0) for h in rollout.hidden),
        weight.to(advantages.dtype),
        lengths,
    )
