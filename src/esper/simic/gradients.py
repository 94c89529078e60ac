"""Gradients of a loss: computed, measured, clipped and checked before the optimizer's step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline.metrics import Metric, part_metric
from esper.simic.update_metrics import Metrics
from esper.tamiyo.policy.interface import Policy


class LossScaler:
    """A factor on the loss that keeps small gradients above float16's smallest number.

    Micikevicius et al., "Mixed precision training" (2018): a step whose gradient overflows is
    skipped and halves the factor; ``GROWTH_INTERVAL`` steps without overflow double it. Everything
    stays on the device. ``torch.amp.GradScaler`` scales in the same way, but it cannot skip a step
    for another reason and, if the optimizer is not fused, makes the CPU wait for the device.

    Args:
        device: device of the factor.
    """

    INITIAL_SCALE, MIN_SCALE, GROWTH_INTERVAL = 2.0**16, 1.0, 2000

    def __init__(self, device: torch.device):
        self.scale = torch.full((), self.INITIAL_SCALE, device=device)
        self.good_steps = torch.zeros((), device=device)

    def product(self, loss: Tensor) -> Tensor:
        """The scaled loss, from which the backward pass starts."""
        return loss * self.scale

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the factor, in place."""
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def may_overflow(self) -> Tensor:
        """Whether the factor may have caused a gradient that is not finite, bool scalar."""
        return self.scale > self.MIN_SCALE

    def adapt(self, overflow: Tensor) -> None:
        """Adapt the factor after a step; ``overflow`` is a bool scalar on the device."""
        good = torch.where(overflow, 0.0, self.good_steps + 1.0)
        grow = good >= self.GROWTH_INTERVAL
        change = torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0))
        self.scale.mul_(change).clamp_(min=self.MIN_SCALE)
        self.good_steps.copy_(torch.where(grow, 0.0, good))

    def state(self) -> dict[str, Tensor]:
        """Factor and step count, for the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        self.scale.copy_(state["scale"])
        self.good_steps.copy_(state["good_steps"])


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


class GradientNorms:
    """Computes global and per-head gradient norms from the norm of each parameter, and clips.

    Args:
        policy: policy whose gradients are measured.
        device: device of the gradients.
    """

    def __init__(self, policy: Policy[Any], device: torch.device):
        self.parameters = list(policy.parameters())
        self.heads = (*policy.heads, "value")
        self.head_parameters = {head: policy.head_parameters(head) for head in self.heads}
        index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        mask = torch.zeros(len(self.heads), len(self.parameters), dtype=torch.bool)
        for row, head in enumerate(self.heads):
            mask[row, [index[id(parameter)] for parameter in self.head_parameters[head]]] = True
        self.head_mask = mask.to(device)

    def measure(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The global norm and the norm of each head's gradients, scalars on the device.

        A head's norm is None, not 0 or NaN, if one of its parameters has no gradient: that happens
        if the head's log-probs are detached from its parameters.
        """
        zero = self.head_mask.new_zeros((), dtype=torch.float32)
        present = [p.grad if p.grad is not None else zero for p in self.parameters]
        squares = torch.stack(torch._foreach_norm(present)).square()
        each = torch.where(self.head_mask, squares, 0.0).sum(1).sqrt()
        heads: dict[str, Tensor | None] = {
            head: None if any(p.grad is None for p in self.head_parameters[head]) else each[row]
            for row, head in enumerate(self.heads)
        }
        return squares.sum().sqrt(), heads

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale the gradients, whose norm is ``norm``, down to at most ``max_norm``, in place."""
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)


class CheckedGradients(NamedTuple):
    """What the check found; scalars on the device.

    Attributes:
        norm: global norm before clipping.
        heads: metrics with the norm of each head.
        refusal: 1 if loss or gradient are not finite without an overflow, else 0.
        overflow: 1 if float16 overflowed, which is no error, else 0.
    """

    norm: Tensor
    heads: Metrics
    refusal: Tensor
    overflow: Tensor


def backward(loss: Tensor, parameters: Iterable[nn.Parameter], scaler: LossScaler | None) -> None:
    """Compute the gradients of ``loss``, with its scaling taken out again."""
    if scaler is None:
        loss.backward()
    else:
        scaler.product(loss).backward()
        scaler.unscale([p.grad for p in parameters if p.grad is not None])


def check_gradients(
    loss: Tensor, norms: GradientNorms, scaler: LossScaler | None, max_norm: float
) -> CheckedGradients:
    """Clip the gradients of ``loss`` to ``max_norm``, check them, and adapt the scaler."""
    norm, heads = norms.measure()
    norms.clip(norm, max_norm)
    finite = loss.isfinite() & norm.isfinite()
    overflow = _overflow(loss, norm, scaler)
    refusal = (~(finite | overflow)).float()
    head_norms = {part_metric(Metric.HEAD_GRAD_NORMS, head): value for head, value in heads.items()}
    return CheckedGradients(norm, head_norms, refusal, overflow.float())


def _overflow(loss: Tensor, norm: Tensor, scaler: LossScaler | None) -> Tensor:
    """Whether float16 overflowed, bool scalar. No error: the scaler lowers its factor."""
    if scaler is None:
        return torch.zeros_like(loss, dtype=torch.bool)
    overflow = loss.isfinite() & ~norm.isfinite() & scaler.may_overflow()
    scaler.adapt(overflow)
    return overflow
