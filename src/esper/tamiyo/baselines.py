"""What acts on observations, and the control that never acts."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import CANONICAL_CHOICE, HEADS, Op

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from esper.tamiyo.policy.features import Observation

RowsT = TypeVar("RowsT", bound="DataclassInstance")

SEARCHES = ("widen", "deepen")
"""Policies that change the layers of a user's own module; the others plant seeds."""


class Actor(Protocol):
    """Chooses actions from observations, one step at a time."""

    def begin(self, environments: Tensor, episode: int) -> None:
        """Prepare for an episode of the given environments."""
        ...

    def act(self, observation: "Observation", step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Actions int64 ``[N, heads]``, their log-probs ``[N]`` and the values ``[N]``."""
        ...


def without_learning(actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``actions [N, heads]`` that were certain, so that their log-probs are 0, and values of 0.

    Log-probs and values have the shape ``[N]``.
    """
    zeros = torch.zeros(len(actions), device=actions.device)
    return actions, zeros, zeros


def with_canonical(heads: Mapping[str, Tensor]) -> Tensor:
    """Actions int64 ``[N, heads]``; a head that is not given takes its canonical choice.

    Args:
        heads: options of some heads by name, ``op`` and ``slot`` among them, int64 ``[N]``.
    """
    op = heads["op"]
    columns = [
        heads[head] if head in heads else torch.full_like(op, CANONICAL_CHOICE[head])
        for head in HEADS
    ]
    return torch.stack(columns, -1)


def first_applicable(
    requests: dict[Op, Tensor], scores: dict[Op, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The first operation that is wanted in some slot, and that slot; WAIT and 0 if none is.

    Args:
        requests: operations in order of precedence, and the slots in which each is wanted, bool
            ``[N, S]``.
        scores: a score above 0 for each slot of some operations, float ``[N, S]``: of the slots
            that want the operation the one of the highest score is taken, otherwise the first.

    Returns:
        operation and slot, int64 ``[N]``.
    """
    first = next(iter(requests.values()))
    op = torch.full_like(first[:, 0], int(Op.WAIT), dtype=torch.long)
    slot = torch.zeros_like(op)
    for choice, slots in reversed(requests.items()):
        where, score = slots.any(1), slots.float()
        if scores is not None and choice in scores:
            score = torch.where(slots, scores[choice], 0.0)
        op = torch.where(where, int(choice), op)
        slot = torch.where(where, score.argmax(1), slot)
    return op, slot


def on_device(rows: RowsT, device: torch.device) -> RowsT:
    """A dataclass of tensors alone, with each of them on ``device``."""
    return type(rows)(*(getattr(rows, field.name).to(device) for field in fields(rows)))


def blueprint_of(size: float, slot: SlotSpec) -> int:
    """The blueprint at ``size`` among those that a slot accepts, ordered by parameters."""
    kinds = sorted(slot.kinds, key=lambda kind: slot.layouts[kind].size)
    return kinds[round(size * (len(kinds) - 1))]


class NeverActor:
    """Chooses WAIT in every step."""

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""

    def act(self, observation: "Observation", step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``."""
        count = len(observation.host)
        shape = (count, len(HEADS))
        waits = torch.full(shape, int(Op.WAIT), device=observation.host.device)
        return without_learning(waits)
