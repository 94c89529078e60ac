"""The mode ``shaped``: every step credits each seed's contribution and charges for every action.

Accuracies are in percentage points: ``c`` is a seed's contribution, ``progress`` the accuracy
gained since it germinated, ``imp`` the score minus that of the never-grow twin.
"""

import math

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
from esper.tamiyo.policy.features import growth

RATIO_LIMIT = 5.0
"""Ratio of a seed's contribution to the improvement above which the seed is charged."""
MIN_IMPROVEMENT = 0.1
"""Lower bound of the improvement in that ratio, in points."""
RATIO_RATE, RATIO_CAP = 0.02, 0.3
PRICE_RATE, PRICE_CAP = 0.5, 1.5
SHOCK_RATE, SHOCK_CAP = 0.1958, 1.0
OCCUPANCY = 0.01
"""Cost per step of each living seed after the first."""
OP_COST = {Op.GERMINATE: 0.15, Op.SET_ALPHA_TARGET: 0.005, Op.PRUNE: 0.005, Op.FOSSILISE: 0.01}
BLEND_COST = 0.1
"""Cost of ADVANCE out of TRAINING."""
FOSSIL_BASE = 0.5 + 3.0 * math.tanh(1.0 / 3.0)
ACCURACY_RATE = 5.0
"""Reward of a committed accuracy of 1 on the last step."""


def shaped_reward(inputs: RewardInputs) -> Tensor:
    """Credit for contributions minus the price, shock, occupancy and the action's cost, ``[N]``.

    Includes ``stage_shaping``. Between ``-(103 S + 15)`` and ``103 S + 17`` for S slots.
    """
    reward = (
        attribution(inputs)
        + stage_shaping(inputs)
        - _price(inputs)
        - alpha_shock(inputs)
        - _occupancy(inputs)
        - _action_cost(inputs)
        + fossil_bonus(inputs)
    )
    return reward + ACCURACY_RATE * inputs.accuracy if inputs.last else reward


def attribution(inputs: RewardInputs) -> Tensor:
    """Credit for the measured contributions of the seeds in BLENDING or HOLDING, ``[N]``.

    A harmful seed is charged its c. A helpful one earns c if c is below its progress, otherwise the
    harmonic mean of both (0 if the progress is not positive). Its credit is multiplied by
    ``min(1, 2 sigmoid(3 imp))``, which is below 1 if growth has made the host worse.

    If c is above five times the improvement, a charge of at most 0.3 is subtracted: removing a seed
    on which the host has come to depend costs much accuracy, although the host with the seed is
    hardly better than its twin. The last step gives no credit, because seeds that are not
    fossilised are removed.
    """
    if inputs.last:
        return torch.zeros_like(inputs.score)
    stage = inputs.after.stage
    pending = (stage == Stage.BLENDING) | (stage == Stage.HOLDING)
    c = contribution_points(inputs)
    progress = 100.0 * (inputs.accuracy[:, None] - inputs.birth_accuracy)
    imp = improvement(inputs)[:, None]
    credit = torch.where((c < 0) | (c < progress), c, harmonic_mean(progress, c))
    # 2 sigmoid(3 imp) by tanh: torch.sigmoid's rounding depends on the position in the tensor.
    factor = 1.0 + torch.tanh(1.5 * imp.clamp(max=0.0))
    credit = torch.where(credit > 0, credit * factor, credit)
    ratio = c / imp.clamp(min=MIN_IMPROVEMENT)
    charge = (RATIO_RATE * (ratio - RATIO_LIMIT)).clamp(0.0, RATIO_CAP)
    return torch.where(pending, credit - charge, 0.0).sum(1)


def alpha_shock(inputs: RewardInputs) -> Tensor:
    """``min(0.1958 sum (change of alpha)^2 seed / host, 1)``, ``[N]``.

    The squared steps of a ramp add up to less than the square of one jump.
    """
    dtype = inputs.score.dtype
    change = inputs.after.alpha.to(dtype) - inputs.before.alpha.to(dtype)
    size = inputs.seed_parameters.to(dtype) / inputs.host_parameters
    return (SHOCK_RATE * (change.square() * size).sum(1)).clamp(max=SHOCK_CAP)


def fossil_bonus(inputs: RewardInputs) -> Tensor:
    """Reward of FOSSILISE, ``[N]``, in [-11.7, 11.5]; 0 for other operations.

    If c is a point or more: ``(0.5 + 0.1 c + 3 tanh(1/3)) m`` with m = ``time_held``. If c is less
    or was not measured: -0.2, and a further -0.1 per point below 0. If growth has made the host
    worse, there is no bonus and a charge of ``0.5 + min(0.2 |imp|, 1)`` is subtracted.
    """
    imp = improvement(inputs)[:, None]
    c = contribution_points(inputs)
    bonus = torch.where(imp < 0, 0.0, (FOSSIL_BASE + 0.1 * c) * time_held(inputs))
    reward = torch.where(c >= 1.0, bonus, -0.2 + 0.1 * c.clamp(max=0.0))
    charge = torch.where(imp < 0, 0.5 + (-0.2 * imp).clamp(max=1.0), 0.0)
    return torch.where(affected_slots(inputs, Op.FOSSILISE), reward - charge, 0.0).sum(1)


def _price(inputs: RewardInputs) -> Tensor:
    grown = growth(inputs.score, inputs.added_parameters, inputs.host_parameters)
    return (PRICE_RATE * grown).clamp(max=PRICE_CAP)


def _occupancy(inputs: RewardInputs) -> Tensor:
    return OCCUPANCY * (inputs.after.living.sum(1) - 1).clamp(min=0).to(inputs.score.dtype)


def _action_cost(inputs: RewardInputs) -> Tensor:
    blends = affected_slots(inputs, Op.ADVANCE) & (inputs.before.stage == Stage.TRAINING)
    cost = BLEND_COST * blends.any(1).to(inputs.score.dtype)
    for op, price in OP_COST.items():
        cost = cost + price * (inputs.op == op).to(cost.dtype)
    return cost
