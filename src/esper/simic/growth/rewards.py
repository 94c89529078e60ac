"""Rewards: pure tensor functions of one step of N environments.

Accuracies in formulas are in percentage points: ``c`` is a seed's contribution, ``progress`` the
accuracy gained since it germinated, ``imp`` the score minus that of the never-grow twin.

The shaping on the stages of seeds is potential-based (Ng, Harada and Russell, "Policy invariance
under reward transformations", ICML 1999): adding a reward ``gamma Phi(s') - Phi(s)`` does not
change the optimal policies. With gamma 1, and Phi 0 before the first step and after the last, the
added rewards of an episode sum to 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from esper.kasmina.seeds import SeedState
from esper.kasmina.transfer import cached_tensor
from esper.leyline.actions import Op
from esper.leyline.config.setting import assignments
from esper.leyline.stages import STAGE_COUNT, Stage
from esper.tamiyo.policy.features import growth, utility

REFERENCE_LENGTH = 150
"""Episode length for which the ages and rates in the reward constants were set."""
HOLDING_STEPS = 5
"""Steps in HOLDING that earn the full bonus of FOSSILISE in an episode of ``REFERENCE_LENGTH``."""


@dataclass(frozen=True, slots=True)
class RewardInputs:
    """One step of N environments whose hosts have one shape, with S slots.

    Floats outside the seed states have one dtype, float32 or float64.

    Attributes:
        step: number of the step, from 1.
        episode_length: steps per episode.
        last: whether this is the last step.
        op: the operation that took effect, int64 ``[N]``; WAIT for an illegal action.
        slot: slot named by the action, int64 ``[N]``; used only if an operation took effect.
        before: seeds before the action, equal to ``after`` of the previous step.
        after: seeds after this step's tick.
        contribution: expected accuracy with the seed minus without it, in [-1, 1], measured after
            the action, ``[N, S]``; NaN for slots without an acting seed.
        accuracy: validation accuracy, ``[N]``; on the last step that of the committed host, which
            has fossilised seeds only.
        initial_accuracy: validation accuracy before the first step, ``[N]``.
        birth_accuracy: accuracy when the seed germinated, ``[N, S]``; NaN in empty slots.
        score: mean expected accuracy of the last three steps, ``[N]``; on the last step that of
            the committed host.
        twin_score: the same for the never-grow twin.
        previous_gain: ``u - s_twin`` of the previous step, ``[N]``; 0 in the first step.
        host_parameters: parameters of the host without seeds.
        seed_parameters: parameters of the seeds that are alive before or after the step, int64
            ``[N, S]``; 0 elsewhere. A seed pruned in this step is included, for alpha shock.
        added_parameters: parameters that are priced, ``[N]``: those of acting seeds, on the last
            step those of fossilised seeds.
        price: price of parameters, ``[N]``.
        credit: what ``escrow`` has paid for each seed so far, ``[N, S]``; 0 in other modes.
        loss, previous_loss: validation loss in nats after and before the step, ``[N]``.
        options: numbers of the modes of the prior system.
    """

    step: int
    episode_length: int
    last: bool
    op: Tensor
    slot: Tensor
    before: SeedState
    after: SeedState
    contribution: Tensor
    accuracy: Tensor
    initial_accuracy: Tensor
    birth_accuracy: Tensor
    score: Tensor
    twin_score: Tensor
    previous_gain: Tensor
    host_parameters: int
    seed_parameters: Tensor
    added_parameters: Tensor
    price: Tensor
    credit: Tensor
    loss: Tensor
    previous_loss: Tensor
    options: "RewardOptions" = field(default_factory=lambda: RewardOptions())


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """Numbers of the modes of the prior system.

    Attributes:
        parameter_budget: added parameters that cost ``parameter_penalty`` per step (basic modes),
            or once (sparse).
        parameter_penalty: that cost.
        sparse_scale: factor of the reward of ``sparse``.
        accuracy_weight: reward of the accuracy gained over the episode (basic modes).
        rent_floor: smallest number of host parameters that the price of ``shaped`` and ``escrow``
            is relative to.
        shaping: factor of the shaping in these modes.
        terminal: factor of what their last step pays.
        anti_gaming: factor of the charge on a ratio of contribution to improvement above 5.
    """

    parameter_budget: float = 500_000.0
    parameter_penalty: float = 0.1
    sparse_scale: float = 1.0
    accuracy_weight: float = 5.0
    rent_floor: float = 0.0
    shaping: float = 1.0
    terminal: float = 1.0
    anti_gaming: float = 1.0

    @classmethod
    def of(cls, texts: Sequence[str]) -> "RewardOptions":
        """The options of the setting ``reward_options``.

        Raises:
            UsageError: see ``assignments``.
        """
        return cls(**assignments("reward_options", texts, [f.name for f in fields(cls)]))


RewardFunction = Callable[[RewardInputs], Tensor]
"""A reward mode: computes rewards ``[N]`` in the dtype of the score."""


def affected_slots(inputs: RewardInputs, op: Op) -> Tensor:
    """The slots in which ``op`` took effect, bool ``[N, S]``."""
    slots = inputs.before.stage.shape[1]
    # An illegal action may name a slot that does not exist, so compare instead of indexing.
    is_target = inputs.slot[:, None] == torch.arange(slots, device=inputs.slot.device)
    return is_target & (inputs.op == op)[:, None]


def improvement(inputs: RewardInputs) -> Tensor:
    """Score minus the score of the never-grow twin in percentage points, ``[N]``."""
    return 100.0 * (inputs.score - inputs.twin_score)


def contribution_points(inputs: RewardInputs) -> Tensor:
    """Contribution in percentage points, ``[N, S]``; 0 where it was not measured."""
    contribution = inputs.contribution
    return 100.0 * torch.where(contribution.isnan(), 0.0, contribution)


def time_held(inputs: RewardInputs) -> Tensor:
    """Age of each seed in its stage as a share of ``HOLDING_STEPS``, at most 1, ``[N, S]``.

    ``HOLDING_STEPS`` is scaled with the episode length, like the ages of the lifecycle.
    """
    steps = max(1, round(HOLDING_STEPS * inputs.episode_length / REFERENCE_LENGTH))
    return (inputs.before.stage_age.to(inputs.score.dtype) / steps).clamp(max=1.0)


def harmonic_mean(a: Tensor, b: Tensor) -> Tensor:
    """``2ab / (a + b)`` where both are positive, 0 elsewhere; elementwise."""
    positive = (a > 0) & (b > 0)
    return torch.where(positive, 2.0 * a * b / (a + b), 0.0)


SHAPING_SCALE = 0.3
AGE_RATE = 0.3
"""Potential gained per step in a stage, for an episode of 150 steps."""
AGE_CAP = 2.0

POTENTIALS: dict[int, float] = {
    Stage.GERMINATED: 1.0,
    Stage.TRAINING: 2.0,
    Stage.BLENDING: 3.5,
    Stage.HOLDING: 5.5,
    Stage.FOSSILISED: 6.0,
}
"""Potential of a seed that has just entered the stage; 0 for stages not listed."""


def stage_potential(inputs: RewardInputs, which: Literal["before", "after"]) -> Tensor:
    """Potential of the seeds of each environment, ``[N]``, in [0, 8 S].

    The sum over the slots of the stage's potential and, for a living seed,
    ``min(0.3 (150 / T) stage_age, 2)``. The potential after the last step is 0.
    """
    if which == "after" and inputs.last:
        return torch.zeros_like(inputs.score)
    state = inputs.before if which == "before" else inputs.after
    dtype = inputs.score.dtype
    table = tuple(POTENTIALS.get(stage, 0.0) for stage in range(STAGE_COUNT))
    by_stage = cached_tensor(table, state.stage.device)[state.stage].to(dtype)
    rate = AGE_RATE * REFERENCE_LENGTH / inputs.episode_length
    by_age = (rate * state.stage_age.to(dtype)).clamp(max=AGE_CAP)
    return (by_stage + torch.where(state.living, by_age, 0.0)).sum(1)


def stage_shaping(inputs: RewardInputs) -> Tensor:
    """``0.3 (Phi_after - Phi_before)``, ``[N]``, in [-2.4 S, 2.4 S]; sums to 0 over an episode.

    The sum is over all slots, not only the action's, so that the potential before a step equals
    that after the previous step whatever the actions were.
    """
    return SHAPING_SCALE * (stage_potential(inputs, "after") - stage_potential(inputs, "before"))


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


FIRST_SHARE, DRIP_CAP = 0.3, 0.1
"""Of the bonus of ``basic_plus``: the share paid at once, and the most that a later step pays."""
LOSS_STEP = 0.05
CREDIT_STEP = 2.0
"""Most by which the credit of a seed changes in a step of ``escrow``."""
ACTION_COST = 0.01
CONTRIBUTING = 0.01
"""Smallest contribution with which ``simplified`` counts a fossilised seed."""


def simplified_reward(inputs: RewardInputs) -> Tensor:
    """``stage_shaping`` minus 0.01 per operation, and a reward for accuracy on the last step.

    The last step adds ``3 accuracy``, and 2 per fossilised seed that contributes a point or more.
    Between ``-(2.4 S + 0.01)`` and ``4.4 S + 3``.
    """
    acts = (inputs.op != Op.WAIT).to(inputs.score.dtype)
    reward = inputs.options.shaping * stage_shaping(inputs) - ACTION_COST * acts
    if not inputs.last:
        return reward
    fossilised = inputs.after.stage == Stage.FOSSILISED
    contributing = (fossilised & (inputs.contribution >= CONTRIBUTING)).sum(1)
    at_end = 3.0 * inputs.accuracy + 2.0 * contributing.to(inputs.score.dtype)
    return reward + inputs.options.terminal * at_end


def basic_reward(inputs: RewardInputs) -> Tensor:
    """``stage_shaping`` minus price, plus rewards for FOSSILISE and, at the end, accuracy gained.

    The price is ``0.1 added / 500000`` per step. Let c be the seed's contribution and imp the
    improvement over the never-grow twin, both in points. FOSSILISE pays ``(0.3 + 0.5 h) m`` if both
    are positive, with their harmonic mean h and m = ``time_held``; -0.5 if c is not positive or was
    not measured; -0.2 if only imp is not positive. The last step pays 5 times the accuracy gained
    over the episode. Between ``-(2.4 S + 5.5 + price)`` and ``2.4 S + 55.3``.
    """
    return _basic(inputs, 1.0)


def basic_plus_reward(inputs: RewardInputs) -> Tensor:
    """``basic`` with 30 % of its bonus for FOSSILISE, and the rest step by step.

    A fossilised seed pays ``0.7 (0.3 + 0.5 h) / T`` in every step in which c and imp are positive,
    and is charged ``0.35 |c| / T`` where c is negative; within [-0.05, 0.1].
    """
    imp = improvement(inputs)[:, None]
    c = contribution_points(inputs)
    pays = (c > 0) & (imp > 0)
    bonus = torch.where(pays, 0.3 + 0.5 * harmonic_mean(imp, c), 0.5 * c.clamp(max=0.0))
    drip = ((1.0 - FIRST_SHARE) / inputs.episode_length * bonus).clamp(-0.5 * DRIP_CAP, DRIP_CAP)
    fossilised = inputs.before.stage == Stage.FOSSILISED
    return _basic(inputs, FIRST_SHARE) + torch.where(fossilised, drip, 0.0).sum(1)


def _basic(inputs: RewardInputs, share: float) -> Tensor:
    """``basic`` with this share of the bonus for FOSSILISE."""
    imp = improvement(inputs)[:, None]
    c = contribution_points(inputs)
    bonus = share * (0.3 + 0.5 * harmonic_mean(imp, c)) * time_held(inputs)
    payment = torch.where(c <= 0, -0.5, torch.where(imp <= 0, -0.2, bonus))
    fossilised = torch.where(affected_slots(inputs, Op.FOSSILISE), payment, 0.0).sum(1)
    reward = inputs.options.shaping * stage_shaping(inputs) - _budget_cost(inputs) + fossilised
    increase = inputs.accuracy - inputs.initial_accuracy
    weight = inputs.options.accuracy_weight * inputs.options.terminal
    return reward + weight * increase if inputs.last else reward


def sparse_reward(inputs: RewardInputs) -> Tensor:
    """On the last step accuracy minus ``0.1 added / 500000``, clipped to [-1, 1]; 0 before."""
    if not inputs.last:
        return torch.zeros_like(inputs.score)
    return inputs.options.sparse_scale * (inputs.accuracy - _budget_cost(inputs)).clamp(-1.0, 1.0)


def loss_change_reward(inputs: RewardInputs) -> Tensor:
    """5 per fall of the validation loss by 0.05 nats, minus a rent.

    The last step adds ``(2.3 - loss) / 2``, within [0, 1].
    The fall counts up to 0.25 nats, and a rise half as much. The rent is ``0.05 ln(1 + added /
    host)`` after the third step, and a tenth of ``stage_shaping`` is added. The prior system, as
    its code was wired, paid for a rising loss; this one does not.
    """
    change = (5.0 * (inputs.previous_loss - inputs.loss) / LOSS_STEP).clamp(-25.0, 25.0)
    reward = torch.where(change < 0, 0.5 * change, change)
    reward = reward + 0.1 * inputs.options.shaping * stage_shaping(inputs)
    if inputs.step > 3:
        reward = reward - 0.05 * _growth(inputs)
    at_end = ((2.3 - inputs.loss) / 2.0).clamp(0.0, 1.0)
    return reward + inputs.options.terminal * at_end if inputs.last else reward


def _budget_cost(inputs: RewardInputs) -> Tensor:
    rate = inputs.options.parameter_penalty / max(1.0, inputs.options.parameter_budget)
    return rate * inputs.added_parameters.to(inputs.score.dtype)


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
    return _shaped_reward(inputs, attribution(inputs))


def escrow_reward(inputs: RewardInputs) -> Tensor:
    """``shaped`` that pays changes of each seed's credit instead of the credit in every step.

    The credit follows that of ``attribution``, by at most 2 in a step. It stays with a seed that is
    fossilised, and is taken back from one that is pruned or not fossilised at the end: over an
    episode a seed earns its credit when it was fossilised, or nothing.
    """
    return _shaped_reward(inputs, (escrow_credit(inputs) - inputs.credit).sum(1))


def escrow_credit(inputs: RewardInputs) -> Tensor:
    """What each seed has been paid after the step, ``[N, S]``; see ``escrow_reward``."""
    change = (seed_credit(inputs) - inputs.credit).clamp(-CREDIT_STEP, CREDIT_STEP)
    credit = inputs.credit + change if not inputs.last else torch.zeros_like(change)
    fossilised = inputs.after.stage == Stage.FOSSILISED
    return torch.where(
        _pending(inputs), credit, torch.where(fossilised, inputs.credit, torch.zeros_like(credit))
    )


def _shaped_reward(inputs: RewardInputs, credit: Tensor) -> Tensor:
    """``shaped_reward`` with this credit for contributions."""
    reward = (
        credit
        + inputs.options.shaping * stage_shaping(inputs)
        - _price(inputs)
        - alpha_shock(inputs)
        - _occupancy(inputs)
        - _action_cost(inputs)
        + fossil_bonus(inputs)
    )
    weight = ACCURACY_RATE * inputs.options.terminal
    return reward + weight * inputs.accuracy if inputs.last else reward


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
    return torch.zeros_like(inputs.score) if inputs.last else seed_credit(inputs).sum(1)


def _pending(inputs: RewardInputs) -> Tensor:
    stage = inputs.after.stage
    return (stage == Stage.BLENDING) | (stage == Stage.HOLDING)


def seed_credit(inputs: RewardInputs) -> Tensor:
    """The credit of each seed in BLENDING or HOLDING, ``[N, S]``; see ``attribution``."""
    c = contribution_points(inputs)
    progress = 100.0 * (inputs.accuracy[:, None] - inputs.birth_accuracy)
    imp = improvement(inputs)[:, None]
    credit = torch.where((c < 0) | (c < progress), c, harmonic_mean(progress, c))
    # 2 sigmoid(3 imp) by tanh: torch.sigmoid's rounding depends on the position in the tensor.
    factor = 1.0 + torch.tanh(1.5 * imp.clamp(max=0.0))
    credit = torch.where(credit > 0, credit * factor, credit)
    ratio = c / imp.clamp(min=MIN_IMPROVEMENT)
    charge = inputs.options.anti_gaming * (RATIO_RATE * (ratio - RATIO_LIMIT)).clamp(0.0, RATIO_CAP)
    return torch.where(_pending(inputs), credit - charge, 0.0)


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
    return (PRICE_RATE * _growth(inputs)).clamp(max=PRICE_CAP)


def _growth(inputs: RewardInputs) -> Tensor:
    host = max(inputs.host_parameters, int(inputs.options.rent_floor))
    return growth(inputs.score, inputs.added_parameters, host)


def _occupancy(inputs: RewardInputs) -> Tensor:
    return OCCUPANCY * (inputs.after.living.sum(1) - 1).clamp(min=0).to(inputs.score.dtype)


def _action_cost(inputs: RewardInputs) -> Tensor:
    blends = affected_slots(inputs, Op.ADVANCE) & (inputs.before.stage == Stage.TRAINING)
    cost = BLEND_COST * blends.any(1).to(inputs.score.dtype)
    for op, price in OP_COST.items():
        cost = cost + price * (inputs.op == op).to(cost.dtype)
    return cost


REWARDS: dict[str, RewardFunction] = {
    "terminal": terminal_reward,
    "paired": paired_reward,
    "utility": utility_reward,
    "shaped": shaped_reward,
    "escrow": escrow_reward,
    "simplified": simplified_reward,
    "basic": basic_reward,
    "basic_plus": basic_plus_reward,
    "sparse": sparse_reward,
    "loss_change": loss_change_reward,
}
REWARD_MODES = tuple(REWARDS)
