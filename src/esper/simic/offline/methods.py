"""The methods of learning from records: what each minimises, and the metrics that it reports."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.config.offline import ImitationConfig, OfflineConfig
from esper.leyline.metrics import Metric
from esper.simic.advantage import Estimates
from esper.simic.impala import vtrace
from esper.simic.loss import ppo_loss, weighted_mean
from esper.simic.normalise import RunningMoments
from esper.simic.ppo import ADVANTAGE_FLOOR
from esper.simic.trainer import Batch, Loss
from esper.tamiyo.policy.interface import Evaluation


def method_metrics(
    evaluation: Evaluation, batch: Batch, loss: Tensor, policy_loss: Tensor, value_loss: Tensor
) -> dict[str, Tensor]:
    """The metrics by name, detached; scalars, or ``[heads]``."""
    with torch.no_grad():
        weight = batch.weight[..., None]
        entropy, choice = evaluation.head_entropy * weight, evaluation.head_choice * weight
        choices, steps = choice.sum((0, 1)), batch.weight.sum()
        metrics = {
            Metric.LOSS: loss,
            Metric.POLICY_LOSS: policy_loss,
            Metric.VALUE_LOSS: value_loss,
            Metric.NEGATIVE_LOG_LIKELIHOOD: weighted_mean(-evaluation.log_prob, batch.weight),
            Metric.ENTROPY: entropy.sum() / steps,
            Metric.HEAD_ENTROPY: entropy.sum((0, 1)) / choices.clamp(min=1.0),
            Metric.HEAD_CHOICE: choices / steps,
        }
    return {name: value.detach() for name, value in metrics.items()}


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
        trace = vtrace(
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
            values, trace.errors, trace.targets, batch.returns, log_prob, trace.rho
        )
        scalar = batch.returns.new_tensor
        # With importance ratios of 1 the clipped surrogate has the gradient of A log pi.
        loss, metrics = ppo_loss(
            evaluation,
            log_prob,
            estimates.normalised_advantages(batch.weight, ADVANTAGE_FLOOR),
            self.return_moments.scale(trace.targets),
            batch.weight,
            scalar(1.0),
            scalar(self.entropy),
            self.value_weight,
        )
        summary = method_metrics(
            evaluation, batch, loss, metrics[Metric.POLICY_LOSS], metrics[Metric.VALUE_LOSS]
        )
        clip_flags = (log_ratio > math.log(self.rho_clip) + ROUNDING).float()
        return loss, summary | {Metric.RHO_CLIP_FRACTION: weighted_mean(clip_flags, batch.weight)}


@dataclass(frozen=True, slots=True)
class Vine:
    """Expected return of the policy among the recorded episodes of a group.

    The episodes of a group have host and data in common, so those whose actions agree up to a step
    are in one state there, and their returns say what each of the actions that follow is worth. It
    is the vine of Schulman et al., "Trust region policy optimization" (2015), section 5.2, in which
    rollouts branch from common states; here they branch wherever the recorded policies did.

    Let ``p_i`` be the product over the steps of episode i of the probability of its action,
    normalised among the actions that were recorded in its state. The ``p_i`` of a group add up to
    1, and ``J = sum_i p_i G_i`` is the return that the policy expects if it stays among them. Its
    gradient is exact: no action is sampled, no importance ratio and no critic is needed. To
    ``-J / temperature`` is added the negative log-probability that the policy stays, per step;
    where all episodes of a state agree, that is behaviour cloning. And ``-mean_i log p_i`` keeps
    every branch possible: without it a branch that a new policy almost never takes, such as a
    prune, has a gradient of almost 0, and its worth is never learned.

    Attributes:
        value_weight: weight of the critic's error; the critic is fitted to the returns.
        return_moments: relate the critic's normalised values to the units of the rewards; J is in
            standard deviations of the returns.
        temperature: the lower, the more J counts and the less staying does.
        entropy: weight of keeping every branch possible.
    """

    value_weight: float
    return_moments: RunningMoments
    temperature: float
    entropy: float

    def __call__(self, evaluation: Evaluation, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Loss``."""
        stay, log_probability = branches(evaluation.log_prob, batch)
        probability = log_probability.exp()
        returns = self.return_moments.scale(batch.returns)
        expectation = (probability * relative(returns[0], batch.group)).sum() / probability.sum()
        stay_loss = weighted_mean(-stay, batch.weight)
        value_loss = 0.5 * weighted_mean((evaluation.value - returns).square(), batch.weight)
        policy_loss = (
            stay_loss - expectation / self.temperature - self.entropy * log_probability.mean()
        )
        loss = policy_loss + self.value_weight * value_loss
        metrics = method_metrics(evaluation, batch, loss, policy_loss, value_loss)
        return loss, metrics | {Metric.EXPECTED_GAIN: expectation.detach()}


def branches(log_prob: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Where the episodes of a batch part, and how probable each of them is.

    Args:
        log_prob: of the recorded actions under the policy, ``[T, B]``.
        batch: episodes in whole groups.

    Returns:
        log-probability of each step that the action is one of those recorded in its state,
        ``[T, B]``; log-probability of each episode among those of its group, ``[B]``. Episodes with
        the same actions throughout share their probability equally.
    """
    actions, inside = batch.actions, batch.weight > 0
    equal = (actions[:, :, None] == actions[:, None]).all(-1)
    # Steps after the end of an episode pad it, and no action is chosen there.
    together = inside[:, :, None] == inside[:, None]
    group = batch.group[:, None] == batch.group
    before = torch.cat([torch.ones_like(equal[:1]), equal[:-1]]).cumprod(0).bool()
    state = before & group & together
    agreement = state & equal
    # Each action counts once, however many episodes took it.
    share = log_prob - agreement.sum(-1).log()
    stay = share[:, None].expand(agreement.shape).masked_fill(~state, -torch.inf).logsumexp(-1)
    path_log_prob = torch.where(inside, log_prob - stay, 0.0).sum(0)
    return stay, path_log_prob - agreement[-1].sum(-1).log()


def relative(returns: Tensor, group: Tensor) -> Tensor:
    """``returns [B]`` minus their mean over the group of each, int64 ``[B]``."""
    membership = (group[:, None] == group).to(returns.dtype)
    return returns - membership @ returns / membership.sum(-1)
