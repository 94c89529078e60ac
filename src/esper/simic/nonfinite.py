"""Detection of numbers that are not finite: flags on the device, tensor names on the CPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an update was refused, and what is needed to replay it.

    Attributes:
        tensor: name of the first tensor with a number that is not finite, such as
            ``observation/host`` or ``gradient/op_head.out.weight``.
        agent: the agent's state before the update, see ``PPOAgent.state``.
        rollout: the rollout of the update, see ``Rollout.state``.
    """

    tensor: str
    agent: dict[str, dict[str, Any]]
    rollout: dict[str, Any]


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether every number of every floating-point tensor is finite, bool scalar on the device."""
    flags = [x.isfinite().all() for x in tensors if x.is_floating_point()]
    return torch.stack(flags).all()


def first_not_finite(tensors: Mapping[str, Tensor | None]) -> str | None:
    """Name of the first tensor with a number that is not finite, or None; waits for the device."""
    for name, x in tensors.items():
        if x is not None and x.is_floating_point() and not bool(x.isfinite().all()):
            return name
    return None
