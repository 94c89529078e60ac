"""What offline learning minimises: cloning, advantage-weighted regression, vine, V-trace."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.config.offline import ImitationConfig, OfflineConfig
from esper.leyline.metrics import Metric
from esper.simic.estimates import Estimates
from esper.simic.impala.vtrace import vtrace
from esper.simic.loss import ppo_loss, weighted_mean
from esper.simic.normalise import RunningMoments
from esper.simic.offline.method_metrics import method_metrics
from esper.simic.offline.vine import Vine
from esper.simic.ppo import ADVANTAGE_FLOOR
from esper.simic.trainer import Batch, Loss
from esper.tamiyo.policy.interface import Evaluation

MIN_EXPONENT = -50.0
"""Lower bound of advantage / temperature; float32 has no smaller weights than exp(-87)."""

ROUNDING = 1e-4
"""Difference of log-probs that is attributed to float32."""


def method_of(config: ImitationConfig) -> str:
    """The method by which the settings learn."""
    return config.method if isinstance(config, OfflineConfig) else "bc"


def loss_of(config: ImitationConfig, return_moments: RunningMoments) -> Loss:
    """The loss that the settings describe.

    Args:
        config: the settings.
        return_moments: relate the critic's normalised values to the units of the rewards.
    """
    if not isinstance(config, OfflineConfig) or config.method == "bc":
        return BehaviourCloning(config.value_weight, return_moments)
    if config.method == "vine":
        return Vine(config.value_weight, return_moments, config.temperature, config.entropy)
    if config.method == "awr":
        return AdvantageWeightedRegression(
            config.value_weight, return_moments, config.temperature, config.weight_cap
        )
    return OffPolicyActorCritic(
        config.value_weight,
        return_moments,
        config.discount,
        config.trace_decay,
        config.rho_clip,
        config.c_clip,
        config.entropy,
    )


@dataclass(frozen=True, slots=True)
class BehaviourCloning:
    """Negative log-likelihood of the recorded actions, and squared error of the critic.

    Pomerleau, "Efficient training of artificial neural networks for autonomous navigation" (1991).
    The likelihood of an action is the product over the heads that matter for its op, each under
    the mask of its legal options. The critic is fitted to the returns, for learning that follows.

    Attributes:
        value_weight: weight of the critic's error.
        return_moments: relate the critic's normalised values to the units of the rewards.
    """

    value_weight: float
    return_moments: RunningMoments

    def __call__(self, evaluation: Evaluation, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Loss``."""
        returns = self.return_moments.scale(batch.returns)
        weights = self._action_weights(evaluation.value.detach(), returns)
        weight = batch.weight if weights is None else weights * batch.weight
        policy_loss = weighted_mean(-evaluation.log_prob, weight)
        value_loss = 0.5 * weighted_mean((evaluation.value - returns).square(), batch.weight)
        loss = policy_loss + self.value_weight * value_loss
        return loss, method_metrics(evaluation, batch, loss, policy_loss, value_loss)

    def _action_weights(self, values: Tensor, returns: Tensor) -> Tensor | None:
        """Weight of each action, ``[T, B]``; None if all are 1.

        Args:
            values, returns: normalised, ``[T, B]``.
        """
        return None


@dataclass(frozen=True, slots=True)
class AdvantageWeightedRegression(BehaviourCloning):
    """Cloning in which an action counts by ``min(exp(A / temperature), weight_cap)``.

    Peng et al., "Advantage-weighted regression: simple and scalable off-policy reinforcement
    learning" (2019), equation 8 and section 3.2, with the advantage ``A = G - V(s)`` in standard
    deviations of the returns G. The critic is fitted to the returns in the same step instead of
    before it. The weights are divided by their mean over the batch, so that the temperature does
    not change the weight of the critic's error; Nair et al., "AWAC" (2020), do so too.

    Attributes:
        temperature: beta.
        weight_cap: upper bound of a weight.
    """

    temperature: float
    weight_cap: float

    def _action_weights(self, values: Tensor, returns: Tensor) -> Tensor | None:
        exponent = (returns - values) / self.temperature
        # Bounded before the exponential: it could overflow, or be 0 for a whole batch.
        return exponent.clamp(MIN_EXPONENT, math.log(self.weight_cap)).exp()


@dataclass(frozen=True, slots=True)
class OffPolicyActorCritic:
    """The step of IMPALA: V-trace from the log-probs of the policy that acted.

    Espeholt et al. (2018), see ``simic.impala``: policy gradient with advantages of V-trace, which
    are normalised as in the update of ``esper train impala``, critic and entropy bonus.

    Attributes:
        value_weight: weight of the critic's error.
        return_moments: relate the critic's normalised values to the units of the rewards.
        discount: gamma.
        trace_decay, rho_clip, c_clip: see ``vtrace``.
        entropy: weight of the entropy bonus.
    """

    value_weight: float
    return_moments: RunningMoments
    discount: float
    trace_decay: float
    rho_clip: float
    c_clip: float
    entropy: float

    def __call__(self, evaluation: Evaluation, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Loss``."""
        log_prob = evaluation.log_prob.detach()
        inside = batch.weight > 0
        # Log-probs of padding are arbitrary, and their ratio may overflow.
        log_ratio = torch.where(inside, log_prob - batch.log_prob, 0.0)
        values = self.return_moments.restore(evaluation.value.detach())
        found = vtrace(
            log_ratio,
            batch.rewards,
            values,
            # Every episode terminates, so nothing follows its last step.
            torch.zeros_like(values[0]),
            batch.terminated,
            self.discount,
            None,
            self.rho_clip,
            self.c_clip,
            self.trace_decay,
        )
        estimates = Estimates(
            values, found.errors, found.targets, batch.returns, log_prob, found.rho
        )
        scalar = batch.returns.new_tensor
        # With importance ratios of 1 the clipped surrogate has the gradient of A log pi.
        loss, metrics = ppo_loss(
            evaluation,
            log_prob,
            estimates.normalised_advantages(batch.weight, ADVANTAGE_FLOOR),
            self.return_moments.scale(found.targets),
            batch.weight,
            scalar(1.0),
            scalar(self.entropy),
            self.value_weight,
        )
        own = method_metrics(
            evaluation, batch, loss, metrics[Metric.POLICY_LOSS], metrics[Metric.VALUE_LOSS]
        )
        clipped = (log_ratio > math.log(self.rho_clip) + ROUNDING).float()
        return loss, own | {Metric.RHO_CLIP_FRACTION: weighted_mean(clipped, batch.weight)}
