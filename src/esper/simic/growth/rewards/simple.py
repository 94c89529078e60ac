"""The modes ``simplified``, ``basic`` and ``sparse``, whose main reward is on the last step."""

import torch
from torch import Tensor

from esper.leyline.actions import Op
from esper.leyline.stages import Stage
from esper.simic.growth.rewards.inputs import (
    RewardInputs,
    affected_slots,
    contribution_points,
    harmonic_mean,
    improvement,
    time_held,
)
from esper.simic.growth.rewards.shaping import stage_shaping

PARAMETER_BUDGET = 500_000
"""Added parameters that cost 0.1, whatever the size of the host."""
PARAMETER_COST = 0.1
ACTION_COST = 0.01
CONTRIBUTING = 0.01
"""Smallest contribution with which ``simplified`` counts a fossilised seed."""


def simplified_reward(inputs: RewardInputs) -> Tensor:
    """``stage_shaping`` minus 0.01 per operation, and a reward for accuracy on the last step.

    The last step adds ``3 accuracy``, and 2 per fossilised seed that contributes a point or more.
    Between ``-(2.4 S + 0.01)`` and ``4.4 S + 3``.
    """
    acts = (inputs.op != Op.WAIT).to(inputs.score.dtype)
    reward = stage_shaping(inputs) - ACTION_COST * acts
    if not inputs.last:
        return reward
    fossilised = inputs.after.stage == Stage.FOSSILISED
    contributing = (fossilised & (inputs.contribution >= CONTRIBUTING)).sum(1)
    return reward + 3.0 * inputs.accuracy + 2.0 * contributing.to(inputs.score.dtype)


def basic_reward(inputs: RewardInputs) -> Tensor:
    """``stage_shaping`` minus price, plus rewards for FOSSILISE and, at the end, accuracy gained.

    The price is ``0.1 added / 500000`` per step. Let c be the seed's contribution and imp the
    improvement over the never-grow twin, both in points. FOSSILISE pays ``(0.3 + 0.5 h) m`` if both
    are positive, with their harmonic mean h and m = ``time_held``; -0.5 if c is not positive or was
    not measured; -0.2 if only imp is not positive. The last step pays 5 times the accuracy gained
    over the episode. Between ``-(2.4 S + 5.5 + price)`` and ``2.4 S + 55.3``.
    """
    imp = improvement(inputs)[:, None]
    c = contribution_points(inputs)
    bonus = (0.3 + 0.5 * harmonic_mean(imp, c)) * time_held(inputs)
    payment = torch.where(c <= 0, -0.5, torch.where(imp <= 0, -0.2, bonus))
    fossilised = torch.where(affected_slots(inputs, Op.FOSSILISE), payment, 0.0).sum(1)
    reward = stage_shaping(inputs) - _budget_cost(inputs) + fossilised
    increase = inputs.accuracy - inputs.initial_accuracy
    return reward + 5.0 * increase if inputs.last else reward


def sparse_reward(inputs: RewardInputs) -> Tensor:
    """On the last step accuracy minus ``0.1 added / 500000``, clipped to [-1, 1]; 0 before."""
    if not inputs.last:
        return torch.zeros_like(inputs.score)
    return (inputs.accuracy - _budget_cost(inputs)).clamp(-1.0, 1.0)


def _budget_cost(inputs: RewardInputs) -> Tensor:
    return PARAMETER_COST / PARAMETER_BUDGET * inputs.added_parameters.to(inputs.score.dtype)
