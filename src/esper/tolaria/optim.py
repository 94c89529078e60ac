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


# Native twin: hosts/optimizer.h, adamw.
def adamw_(
    parameters: Tensor,
    gradient: Tensor,
    state: AdamState,
    learning_rate: Tensor,
    weight_decay: float,
    active: Tensor | None = None,
) -> None:
    """One AdamW update, in place (Loshchilov and Hutter, 2019, algorithm 2).

    Args:
        parameters: ``[M, P]``.
        gradient: ``[M, P]``; overwritten.
        state: moments and update counts of the same rows.
        learning_rate: ``[M]``, or ``[M, P]`` with a rate for each parameter.
        weight_decay: decoupled; an update multiplies parameters by ``1 - learning_rate *
            weight_decay``.
        active: rows to update, ``[M]`` bool; all when None. The other rows keep parameters, moments
            and count; masking only the gradient would let momentum and decay move them.
    """
    if active is not None:
        before = _copies(parameters, state)
    state.step += 1.0
    rate = _by_column(learning_rate)
    if weight_decay:
        parameters.mul_(1.0 - rate * weight_decay)
    state.first.lerp_(gradient, 1.0 - BETA1)
    state.second.mul_(BETA2).addcmul_(gradient, gradient, value=1.0 - BETA2)
    correction1 = 1.0 - BETA1**state.step
    correction2 = (1.0 - BETA2**state.step).sqrt()
    denominator = torch.sqrt(state.second, out=gradient).div_(correction2[:, None]).add_(EPSILON)
    step_size = rate / correction1[:, None]
    parameters.sub_(step_size * state.first / denominator)
    if active is not None:
        _undo(~active, parameters, state, before)


# Native twin: hosts/optimizer.h, sgd.
def sgd_(
    parameters: Tensor,
    gradient: Tensor,
    state: AdamState,
    learning_rate: Tensor,
    weight_decay: float,
    momentum: float,
    active: Tensor | None = None,
) -> None:
    """One update of SGD with momentum, in place, same as ``torch.optim.SGD``.

    Args:
        parameters, gradient, learning_rate, active: as for ``adamw_``.
        state: holds the momentum buffer in ``first``.
        weight_decay: this multiple of the parameters is added to the gradient.
        momentum: fraction of the momentum buffer that is kept.
    """
    if active is not None:
        before = _copies(parameters, state)
    state.step += 1.0
    if weight_decay:
        gradient.add_(parameters, alpha=weight_decay)
    state.first.mul_(momentum).add_(gradient)
    parameters.sub_(_by_column(learning_rate) * state.first)
    if active is not None:
        _undo(~active, parameters, state, before)


def _by_column(learning_rate: Tensor) -> Tensor:
    return learning_rate[:, None] if learning_rate.ndim == 1 else learning_rate


def _copies(parameters: Tensor, state: AdamState) -> list[Tensor]:
    return [part.clone() for part in (parameters, state.first, state.second, state.step)]


def _undo(rows: Tensor, parameters: Tensor, state: AdamState, before: list[Tensor]) -> None:
    for now, then in zip((parameters, state.first, state.second, state.step), before, strict=True):
        now.copy_(torch.where(rows if now.ndim == 1 else rows[:, None], then, now))
