"""AdamW, SGD and gradient clipping for each row of a flat store independently."""

import torch
from torch import Tensor

from esper.kasmina.stack import AdamState

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


# Native twin: hosts/optimizer.h, clip_scale.
def clip_scale(gradient: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Norm of each row, and the factor that scales it to at most ``max_norm``.

    Same as ``torch.nn.utils.clip_grad_norm_`` applied to each row separately.

    Args:
        gradient: ``[M, P]``.

    Returns:
        norm ``[M]`` before clipping, factor ``[M]`` in (0, 1].
    """
    norm = torch.linalg.vector_norm(gradient, dim=1)
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)


def update_(
    parameters: Tensor,
    gradient: Tensor,
    state: AdamState,
    learning_rate: Tensor,
    weight_decay: float,
    momentum: float | None = None,
    active: Tensor | None = None,
) -> None:
    """One update of SGD with momentum, or of AdamW if ``momentum`` is None, in place.

    Args:
        parameters: ``[M, P]``.
        gradient: ``[M, P]``; overwritten.
        state: moments and update counts of the same rows; SGD's momentum buffer is ``first``.
        learning_rate: ``[M]``, or ``[M, P]`` with a rate for each parameter.
        weight_decay: AdamW multiplies parameters by ``1 - learning_rate * weight_decay``; SGD adds
            this multiple of the parameters to the gradient.
        momentum: fraction of the momentum buffer that is kept.
        active: rows to update, ``[M]`` bool; all when None. The other rows keep parameters, moments
            and count; masking only the gradient would let momentum and decay move them.
    """
    stores = parameters, *state.parts
    before = [] if active is None else [store.clone() for store in stores]
    rate = learning_rate[:, None] if learning_rate.ndim == 1 else learning_rate
    state.step += 1.0
    if momentum is None:
        _adamw(parameters, gradient, state, rate, weight_decay)
    else:
        _sgd(parameters, gradient, state, rate, weight_decay, momentum)
    if active is not None:
        for now, then in zip(stores, before, strict=True):
            now.copy_(torch.where(active if now.ndim == 1 else active[:, None], now, then))


# Native twin: hosts/optimizer.h, adamw.
def _adamw(
    parameters: Tensor, gradient: Tensor, state: AdamState, rate: Tensor, weight_decay: float
) -> None:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""
    if weight_decay:
        parameters.mul_(1.0 - rate * weight_decay)
    state.first.lerp_(gradient, 1.0 - BETA1)
    state.second.mul_(BETA2).addcmul_(gradient, gradient, value=1.0 - BETA2)
    correction1 = 1.0 - BETA1**state.step
    correction2 = (1.0 - BETA2**state.step).sqrt()
    denominator = torch.sqrt(state.second, out=gradient).div_(correction2[:, None]).add_(EPSILON)
    step_size = rate / correction1[:, None]
    parameters.sub_(step_size * state.first / denominator)


# Native twin: hosts/optimizer.h, sgd.
def _sgd(
    parameters: Tensor,
    gradient: Tensor,
    state: AdamState,
    rate: Tensor,
    weight_decay: float,
    momentum: float,
) -> None:
    """SGD with momentum, same as ``torch.optim.SGD``."""
    if weight_decay:
        gradient.add_(parameters, alpha=weight_decay)
    state.first.mul_(momentum).add_(gradient)
    parameters.sub_(rate * state.first)
