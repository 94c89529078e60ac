"""Rewards: what an episode of growing was worth, as tensor functions.

The return is utility, ``u = s - rent ln(1 + added / host)``: s is the validation expected accuracy
(mean of the last three steps), added the parameters of the seeds that act on the output. On the
last step s and added count only what is fossilised; that is what FOSSILISE is for.
"""

import torch
from torch import Tensor

RENT = 0.05
"""What a doubling of parameters costs: 0.05 ln 2 of accuracy."""
REWARD_SCALE = 10.0
SCORE_WINDOW = 3
"""Steps over which the score is averaged."""

REWARD_MODES = ("terminal", "paired")


def utility(score: Tensor, added: Tensor, host_parameters: int, rent: float = RENT) -> Tensor:
    """``score - rent ln(1 + added / host_parameters)``, elementwise.

    Args:
        score: expected accuracy in [0, 1].
        added: parameters of the seeds that count.
        host_parameters: parameters of the host alone.
    """
    return score - rent * (added.to(score.dtype) / host_parameters).log1p()


def terminal_reward(utility_now: Tensor, last: bool) -> Tensor:
    """``10 u`` on the last step and 0 before. The return is ``10 u_T``."""
    return REWARD_SCALE * utility_now if last else torch.zeros_like(utility_now)


def paired_reward(utility_now: Tensor, twin_score: Tensor, previous_gain: Tensor) -> Tensor:
    """``10 (v_t - v_{t-1})`` with the gain ``v = u - s_twin`` over the never-grow twin.

    It telescopes: with ``v_0 = 0`` the return is ``10 (u_T - s_twin)``, which differs from the
    return of ``terminal_reward`` by ``10 s_twin``, a constant that no action changes.
    """
    return REWARD_SCALE * ((utility_now - twin_score) - previous_gain)
