"""Potential-based shaping on the stages of seeds.

Ng, Harada and Russell, "Policy invariance under reward transformations", ICML 1999: adding a reward
``gamma Phi(s') - Phi(s)`` does not change the optimal policies. With gamma 1, and Phi 0 before the
first step and after the last, the added rewards of an episode sum to 0.
"""

from typing import Literal

import torch
from torch import Tensor

from esper.kasmina.cached_tensors import cached_tensor
from esper.leyline.stages import STAGE_COUNT, Stage
from esper.simic.growth.rewards.inputs import REFERENCE_LENGTH, RewardInputs

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
