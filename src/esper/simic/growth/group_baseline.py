"""Advantages relative to the other environments of a group, which share host and data."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from esper.simic.advantage import Estimates, Estimator
from esper.simic.normalise import ObservationMoments, RunningMoments
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.interface import Policy


def leave_one_out(advantages: Tensor, group_size: int) -> Tensor:
    """Advantages ``[T, N]`` minus the mean of those of the other environments of the group.

    Raises:
        ValueError: a group has one environment, or N is not a multiple of its size.
    """
    steps, count = advantages.shape
    if group_size < 2 or count % group_size:
        raise ValueError(f"groups of {group_size} of {count} environments have no other members")
    groups = advantages.view(steps, -1, group_size)
    differences = groups - groups.mean(2, keepdim=True)
    return (differences * (group_size / (group_size - 1))).view(steps, count)


@dataclass(frozen=True, slots=True)
class GroupedEstimator:
    """Advantages relative to those of the other environments of a group.

    Environments of a group share the initial host and the data order, and differ in their actions
    and in the initial weights of their seeds. The others' actions do not depend on an environment's
    own, so the mean of their advantages is a baseline that does not bias the gradient (Kool et al.,
    "Buy 4 REINFORCE samples, get a baseline for free!", 2019).

    Attributes:
        estimator: estimates the advantages before.
        group_size: environments per group; groups follow one another.
    """

    estimator: Estimator
    group_size: int

    def estimate(
        self,
        rollout: Rollout[Any],
        policy: Policy[Any],
        observation_moments: ObservationMoments[Any],
        return_moments: RunningMoments,
    ) -> Estimates:
        """See ``Estimator.estimate``."""
        estimates = self.estimator.estimate(rollout, policy, observation_moments, return_moments)
        return replace(estimates, advantages=leave_one_out(estimates.advantages, self.group_size))
