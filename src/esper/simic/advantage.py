"""Generalised advantage estimation (Schulman et al., 2016)."""

import torch
from torch import Tensor


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    discount: float,
    trace_decay: float,
    truncated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and the returns the critic learns, equations 11 to 16 of the paper.

    ``delta_t = r_t + discount V(s_{t+1}) - V(s_t)``, and
    ``A_t = delta_t + discount trace_decay A_{t+1}``; both V and A are 0 behind a terminated step.
    Behind a truncated one A is 0 and V is that of the state in which the episode was cut off.

    Args:
        rewards: ``[T, N]``.
        values: of the states the rewards followed, ``[T, N]``.
        last_value: of the state after the last step, ``[N]``; unused where that step terminated.
        terminated: bool ``[T, N]``.
        truncated: bool ``[T, N]``; the value after such a step must be of its final state.
        discount: gamma, in [0, 1].
        trace_decay: lambda, in [0, 1].

    Returns:
        advantages ``[T, N]``, returns (advantages plus values) ``[T, N]``.
    """
    not_over = (~terminated).to(values.dtype)
    going_on = not_over if truncated is None else (~(terminated | truncated)).to(values.dtype)
    next_values = torch.cat([values[1:], last_value[None]])
    deltas = rewards + discount * next_values * not_over - values
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(last_value)
    for t in reversed(range(len(rewards))):
        following = deltas[t] + discount * trace_decay * going_on[t] * following
        advantages[t] = following
    return advantages, advantages + values


def explained_variance(
    values: Tensor, returns: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How much of the variance of ``returns [T, N]`` the critic's ``values`` explain.

    Give it the returns that came about (advantages of lambda 1 plus values), not those the critic
    learns, which contain its own opinion. NaN where the returns do not vary.

    Args:
        values, returns: ``[T, N]``.
        weight: 1 for steps that count, 0 for others, ``[T, N]``; None when all count.

    Returns:
        over all steps, and within a time step. The first can be high merely because the critic
        knows what time it is; neither proves that a policy learned anything.
    """
    counts = torch.ones_like(returns) if weight is None else weight

    def spread(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        mean = (x * counts).sum(axes, keepdim=True) / counts.sum(axes, keepdim=True).clamp(min=1)
        return ((x - mean) * counts).square().sum()

    error = returns - values

    def share(axes: tuple[int, ...]) -> Tensor:
        return 1.0 - spread(error, axes) / spread(returns, axes)

    return share((0, 1)), share((1,))
