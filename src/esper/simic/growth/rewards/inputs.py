"""The inputs of a reward: one step of N environments."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.seeds import SeedState
from esper.leyline.actions import Op

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
