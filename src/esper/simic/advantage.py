"""Advantages and value targets of a rollout.

Generalised advantage estimation (Schulman et al., 2016), or another estimator.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from esper.leyline.config import LearnerConfig
from esper.simic.loss import weighted_mean
from esper.simic.normalise import ObservationMoments, RunningMoments
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.interface import Policy


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    discount: float,
    trace_decay: float,
    truncated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and the value targets of the critic, equations 11 to 16 of the paper.

    ``delta_t = r_t + discount V(s_{t+1}) - V(s_t)``, and
    ``A_t = delta_t + discount trace_decay A_{t+1}``. After a terminated step both V and A are 0.
    After a truncated step A is 0, and V is the value of the state in which the episode was cut off.

    Args:
        rewards: ``[T, N]``.
        values: values of the states in which the actions were taken, ``[T, N]``.
        last_value: value of the state after the last step, ``[N]``; unused if that step terminated.
        terminated: bool ``[T, N]``.
        truncated: bool ``[T, N]``; where it is true at t, ``values`` at t + 1 must be the value of
            the state in which the episode was cut off.
        discount: gamma, in [0, 1].
        trace_decay: lambda, in [0, 1].

    Returns:
        advantages ``[T, N]``, returns (advantages plus values) ``[T, N]``.
    """
    deltas, continues = step_errors(rewards, values, last_value, terminated, discount, truncated)
    advantages = decayed_sums(deltas, discount * trace_decay * continues)
    return advantages, advantages + values


def decayed_sums(deltas: Tensor, decays: Tensor) -> Tensor:
    """``x_t = delta_t + decay_t x_{t+1}``, with 0 after the last step; ``[T, ...]`` each."""
    rows, x = [], torch.zeros_like(decays[0])
    for delta, decay in zip(reversed(deltas.unbind()), reversed(decays.unbind()), strict=True):
        x = delta + decay * x
        rows.append(x)
    return torch.stack(rows[::-1])


def step_errors(
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    discount: float,
    truncated: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Errors of the critic over one step, and where an episode continues after it.

    Arguments as for ``generalised_advantages``.

    Returns:
        ``r_t + discount V(s_{t+1}) - V(s_t)``, ``[T, N]``; and 1 where the episode continues, 0
        where it terminated or was truncated, ``[T, N]``.
    """
    alive = (~terminated).to(values.dtype)
    continues = alive if truncated is None else (~(terminated | truncated)).to(values.dtype)
    next_values = torch.cat([values[1:], last_value[None]])
    return rewards + discount * next_values * alive - values, continues


def explained_variance(
    values: Tensor, returns: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Share of the variance of ``returns [T, N]`` that the critic's ``values`` explain.

    ``returns`` should be Monte Carlo returns (advantages with lambda 1 plus values). The critic's
    targets are unsuitable because they contain its own estimates. If the returns do not vary, the
    share is NaN if the values do not vary either, else minus infinity.

    Args:
        values, returns: ``[T, N]``.
        weight: 1 for steps that count, 0 for others, ``[T, N]``; None if all count.

    Returns:
        the share over all steps, and the share within time steps. The first can be high merely
        because the critic knows the time step; neither shows that a policy learned anything.
    """
    counts = torch.ones_like(returns) if weight is None else weight

    def squared_deviations(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        mean = (x * counts).sum(axes, keepdim=True) / counts.sum(axes, keepdim=True).clamp(min=1)
        return ((x - mean) * counts).square().sum()

    error = returns - values

    def share(axes: tuple[int, ...]) -> Tensor:
        return 1.0 - squared_deviations(error, axes) / squared_deviations(returns, axes)

    return share((0, 1)), share((1,))


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
        normals = rollout.values, rollout.last_value
        values, last_value = rollout.with_cut_offs(*map(return_moments.restore, normals))
        ends = rollout.terminated, self.discount, rollout.cut_off
        deltas, continues = step_errors(rollout.rewards, values, last_value, *ends)
        decays = [self.discount * decay * continues for decay in (self.trace_decay, 1.0)]
        # Sums for both decays in one loop, which costs as much as for one.
        both = decayed_sums(deltas[:, None], torch.stack(decays, 1))
        advantages, returns = (x.contiguous() for x in both.unbind(1))
        targets = advantages + values
        return Estimates(values, advantages, targets, returns + values, rollout.log_prob)
