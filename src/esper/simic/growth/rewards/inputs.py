"""What a reward may look at: one step of N environments."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.seeds import SeedState
from esper.leyline.actions import Op

REFERENCE_LENGTH = 150
"""Episode length for which the ages and rates in the reward constants were set."""
HOLDING_STEPS = 5
"""Steps of that length after which a held seed earns the whole bonus of FOSSILISE."""


@dataclass(frozen=True, slots=True)
class RewardInputs:
    """One step of N environments of one host shape with S slots.

    Floats outside the seed states are of one dtype, float32 or float64.

    Attributes:
        step: steps that have passed, this one included, from 1.
        episode_length: steps of an episode.
        last: whether this is the last step.
        op: the operation as it took effect, WAIT where the action was refused, int64 ``[N]``.
        slot: the slot it names, int64 ``[N]``; read only where an operation took effect.
        before: the seeds before the action, which are those after the step before.
        after: the seeds after this step's tick.
        contribution: expected accuracy with minus without the seed, in [-1, 1], measured in this
            step after the action; NaN where no seed acts, ``[N, S]``.
        accuracy: validation accuracy now, ``[N]``; on the last step as committed, that is with
            the fossilised seeds alone.
        initial_accuracy: the same before the first step.
        birth_accuracy: accuracy when the seed germinated, NaN in empty slots, ``[N, S]``.
        score: expected accuracy, mean of the last three steps, ``[N]``; as committed on the last.
        twin_score: the same of the never-grow twin.
        previous_gain: ``u - s_twin`` of the step before, 0 before the first, ``[N]``.
        host_parameters: parameters of the host alone.
        seed_parameters: of the seeds that live before or after the step, 0 elsewhere, int64
            ``[N, S]``. A seed pruned at once still has its own here: alpha shock needs them.
        added: parameters that pay rent, ``[N]``: of acting seeds; on the last step of fossils.
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
    added: Tensor


RewardFunction = Callable[[RewardInputs], Tensor]
"""A reward mode: rewards ``[N]`` in the dtype of the score."""


def chosen(inputs: RewardInputs, op: Op) -> Tensor:
    """The slots in which ``op`` took effect, bool ``[N, S]``."""
    slots = inputs.before.stage.shape[1]
    # A refused action may name a slot that does not exist, so the slot is compared, not indexed.
    named = inputs.slot[:, None] == torch.arange(slots, device=inputs.slot.device)
    return named & (inputs.op == op)[:, None]


def improvement(inputs: RewardInputs) -> Tensor:
    """Score above the never-grow twin's in percentage points, ``[N]``."""
    return 100.0 * (inputs.score - inputs.twin_score)


def contribution_points(inputs: RewardInputs) -> Tensor:
    """Contribution in percentage points, 0 where it was not measured, ``[N, S]``."""
    contribution = inputs.contribution
    return 100.0 * torch.where(contribution.isnan(), 0.0, contribution)


def time_held(inputs: RewardInputs) -> Tensor:
    """Share of the first five steps that a seed had spent in its stage, in [0, 1], ``[N, S]``.

    Five in an episode of 150 steps; it scales as the ages of the lifecycle do.
    """
    steps = max(1, round(HOLDING_STEPS * inputs.episode_length / REFERENCE_LENGTH))
    return (inputs.before.stage_age.to(inputs.score.dtype) / steps).clamp(max=1.0)


def harmonic_mean(one: Tensor, other: Tensor) -> Tensor:
    """``2ab / (a + b)`` where both are positive and 0 elsewhere."""
    positive = (one > 0) & (other > 0)
    return torch.where(positive, 2.0 * one * other / (one + other), 0.0)
