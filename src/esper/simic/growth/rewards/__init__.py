"""Rewards: pure tensor functions of one step of N environments."""

from esper.simic.growth.rewards.inputs import RewardFunction, RewardInputs
from esper.simic.growth.rewards.returns import (
    REWARD_SCALE,
    SCORE_WINDOW,
    paired_reward,
    terminal_reward,
    utility_reward,
)
from esper.simic.growth.rewards.shaped import shaped_reward
from esper.simic.growth.rewards.shaping import stage_potential, stage_shaping
from esper.simic.growth.rewards.simple import basic_reward, simplified_reward, sparse_reward
from esper.tamiyo.policy.features import utility

REWARDS: dict[str, RewardFunction] = {
    "terminal": terminal_reward,
    "paired": paired_reward,
    "utility": utility_reward,
    "shaped": shaped_reward,
    "simplified": simplified_reward,
    "basic": basic_reward,
    "sparse": sparse_reward,
}
REWARD_MODES = tuple(REWARDS)

__all__ = [
    "REWARDS",
    "REWARD_MODES",
    "REWARD_SCALE",
    "SCORE_WINDOW",
    "RewardFunction",
    "RewardInputs",
    "stage_potential",
    "stage_shaping",
    "utility",
]
