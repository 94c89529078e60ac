"""The reward modes whose return is the utility of the grown host."""

import torch
from torch import Tensor

from esper.simic.growth.rewards.inputs import RewardInputs
from esper.tamiyo.policy.features import utility

REWARD_SCALE = 10.0
SCORE_WINDOW = 3
"""Steps over which the score is averaged."""


def terminal_reward(inputs: RewardInputs) -> Tensor:
    """``10 u_T`` on the last step and 0 before, at most 10. The return is ``10 u_T``."""
    return REWARD_SCALE * _utility(inputs) if inputs.last else torch.zeros_like(inputs.score)


def paired_reward(inputs: RewardInputs) -> Tensor:
    """``10 (v_t - v_{t-1})`` with the gain ``v = u - s_twin`` over the never-grow twin.

    The sum telescopes: with ``v_0 = 0`` the return is ``10 (u_T - s_twin)``. That is the return of
    ``terminal_reward`` minus ``10 s_twin``, a term that does not depend on the actions. v is at
    most 1 and at least ``-1 - price ln(1 + added / host)``.
    """
    return REWARD_SCALE * ((_utility(inputs) - inputs.twin_score) - inputs.previous_gain)


def utility_reward(inputs: RewardInputs) -> Tensor:
    """``10 u_t / T`` in every step, at most ``10 / T``. The return is the mean of ``10 u_t``."""
    return REWARD_SCALE / inputs.episode_length * _utility(inputs)


def _utility(inputs: RewardInputs) -> Tensor:
    return utility(inputs.score, inputs.added_parameters, inputs.host_parameters, inputs.price)
