"""The gradients of a loss, clipped and checked before the optimizer's step."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline.metrics import Metric, part_metric
from esper.simic.gradients import GradientNorms
from esper.simic.loss_scaler import LossScaler
from esper.simic.update_metrics import Metrics


class CheckedGradients(NamedTuple):
    """What the check found; scalars on the device.

    Attributes:
        norm: global norm before clipping.
        heads: metrics with the norm of each head.
        refused: 1 if loss or gradient are not finite without an overflow, else 0.
        overflowed: 1 if float16 overflowed, which is no error, else 0.
    """

    norm: Tensor
    heads: Metrics
    refused: Tensor
    overflowed: Tensor


def backward(loss: Tensor, parameters: Iterable[nn.Parameter], scaler: LossScaler | None) -> None:
    """Compute the gradients of ``loss``, with its scaling taken out again."""
    if scaler is None:
        loss.backward()
    else:
        scaler.scaled(loss).backward()
        scaler.unscale([p.grad for p in parameters if p.grad is not None])


def check_gradients(
    loss: Tensor, norms: GradientNorms, scaler: LossScaler | None, max_norm: float
) -> CheckedGradients:
    """Clip the gradients of ``loss`` to ``max_norm``, check them, and adapt the scaler."""
    norm, heads = norms.measure()
    norms.clip(norm, max_norm)
    finite = loss.isfinite() & norm.isfinite()
    overflowed = _overflow(loss, norm, scaler)
    refused = (~(finite | overflowed)).float()
    named = {part_metric(Metric.HEAD_GRAD_NORMS, head): value for head, value in heads.items()}
    return CheckedGradients(norm, named, refused, overflowed.float())


def _overflow(loss: Tensor, norm: Tensor, scaler: LossScaler | None) -> Tensor:
    """Whether float16 overflowed, bool scalar. No error: the scaler lowers its factor."""
    if scaler is None:
        return torch.zeros_like(loss, dtype=torch.bool)
    overflowed = loss.isfinite() & ~norm.isfinite() & scaler.may_overflow()
    scaler.adapt(overflowed)
    return overflowed
