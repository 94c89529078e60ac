"""Estimation of advantages and value targets from a rollout."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

from torch import Tensor

from esper.leyline.config import LearnerConfig
from esper.simic.advantage import generalised_advantages, leave_one_out
from esper.simic.loss import weighted_mean
from esper.simic.normalise import ObservationMoments, RunningMoments
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.interface import Policy


@dataclass(frozen=True, slots=True)
class Estimates:
    """What an update learns from, each ``[T, N]``, in the units of the rewards.

    Attributes:
        values: the critic's values.
        advantages: not normalised, and not weighted by ``rho``.
        targets: value targets.
        returns: Monte Carlo returns, where episodes are cut off completed with ``values``.
        old_log_prob: log-probability of the actions, relative to which the loss takes importance
            ratios.
        rho: weight of each step, by which another policy's experience counts as that of the policy
            that learns; None if every step counts alike.
        metrics: metrics of the estimation, scalars on the device.
    """

    values: Tensor
    advantages: Tensor
    targets: Tensor
    returns: Tensor
    old_log_prob: Tensor
    rho: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)

    def normalised_advantages(self, weight: Tensor | None, floor: float) -> Tensor:
        """Advantages for the loss: mean 0 and deviation 1 under the policy that learns.

        Means are weighted by ``rho`` before the advantages are. If the mean of the weighted
        advantages were subtracted, a step with a ``rho`` of 0 would still move the policy.

        Args:
            weight: 1 for steps that count, 0 for others, ``[T, N]``; None if all count.
            floor: smallest divisor.
        """
        if self.rho is not None:
            weight = self.rho if weight is None else self.rho * weight
        advantages = self.advantages - weighted_mean(self.advantages, weight)
        deviation = weighted_mean(advantages.square(), weight).sqrt()
        advantages = advantages / deviation.clamp(min=floor)
        return advantages if self.rho is None else self.rho * advantages


class Estimator(Protocol):
    """Estimates advantages and value targets."""

    def estimate(
        self,
        rollout: Rollout[Any],
        policy: Policy[Any],
        observation_moments: ObservationMoments[Any],
        return_moments: RunningMoments,
    ) -> Estimates:
        """The estimates for one rollout.

        Args:
            rollout: the rollout.
            policy: the policy that is about to learn from it.
            observation_moments: normalise the policy's observations.
            return_moments: convert the critic's normalised values to the units of the rewards.
        """
        ...


@dataclass(frozen=True, slots=True)
class GeneralisedEstimator:
    """Generalised advantage estimation, from the values and log-probs of the acting policy.

    Attributes:
        discount: gamma.
        trace_decay: lambda.
    """

    discount: float
    trace_decay: float

    @classmethod
    def of(cls, learner: LearnerConfig) -> Self:
        """The estimator that the settings describe."""
        return cls(learner.discount, learner.trace_decay)

    def estimate(
        self,
        rollout: Rollout[Any],
        policy: Policy[Any],
        observation_moments: ObservationMoments[Any],
        return_moments: RunningMoments,
    ) -> Estimates:
        """See ``Estimator.estimate``."""
        values = return_moments.restore(rollout.values)
        last_value = return_moments.restore(rollout.last_value)
        rewards, ends = rollout.rewards, rollout.terminated
        estimate = partial(generalised_advantages, rewards, values, last_value, ends, self.discount)
        advantages, targets = estimate(self.trace_decay, rollout.cut_off)
        _, returns = estimate(1.0, rollout.cut_off)
        return Estimates(values, advantages, targets, returns, rollout.log_prob)


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
