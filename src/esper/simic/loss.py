"""The loss of proximal policy optimisation (Schulman et al., 2017), and its compilation."""

import logging
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import first_line
from esper.leyline.metrics import Metric
from esper.simic.rollout import Sequences
from esper.tamiyo.policy.interface import Evaluation, Policy


def weighted_mean(x: Tensor, weight: Tensor | None) -> Tensor:
    """Mean of ``x`` weighted by ``weight``; over all steps if ``weight`` is None.

    Args:
        x: one number per step, in any shape.
        weight: of the shape of ``x``.
    """
    if weight is None:
        return x.mean()
    return (x * weight).sum() / weight.sum()


def approximate_kl(log_ratio: Tensor, weight: Tensor | None) -> Tensor:
    """KL divergence of the current policy from the one that acted, in nats.

    The k3 estimator (Schulman, "Approximating KL divergence", 2020).

    Args:
        log_ratio: log-probability of the actions under the current policy minus that under the
            policy that acted, in any shape.
        weight: of the same shape, see ``weighted_mean``.
    """
    # expm1 avoids cancellation.
    return weighted_mean(torch.expm1(log_ratio) - log_ratio, weight)


def ppo_loss(
    evaluation: Evaluation,
    old_log_prob: Tensor,
    advantages: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    clip: Tensor,
    entropy_weight: Tensor,
    value_weight: float | Tensor,
    critic_weight: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss, squared error of the critic and entropy bonus (equation 9).

    With importance ratio ``r = exp(log_prob - old_log_prob)``, advantage A, value V, target G and
    entropy H, averaged over steps:
    ``-min(r A, clip(r, 1 - clip, 1 + clip) A) + value_weight (V - G)^2 / 2 - entropy_weight H``.

    Args:
        evaluation: the current policy's evaluation of the actions, ``[L, M]``.
        old_log_prob: log-probability of the actions before the update, see ``Sequences``,
            ``[L, M]``.
        advantages, targets: normalised, ``[L, M]``.
        weight: 1 for steps that count, 0 for padding, ``[L, M]``; None if all count.
        clip: clip range of the importance ratio, a scalar on the device.
        entropy_weight: weight of the entropy bonus, a scalar on the device, or one for each head.
        value_weight: weight of the critic's error.
        critic_weight: like ``weight``, for the critic's error; ``weight`` if None.

    Returns:
        the loss, and its metrics by name, detached: scalars, or ``[heads]`` for the entropy of each
        head and its share of steps with a choice.
    """
    loss, policy_loss, value_loss, entropy, log_ratio, ratio = _SurrogateLoss.apply(
        evaluation.log_prob,
        evaluation.head_entropy,
        evaluation.value,
        old_log_prob,
        advantages,
        targets,
        (weight, weight if critic_weight is None else critic_weight),
        clip,
        entropy_weight,
        value_weight,
    )
    with torch.no_grad():
        kl = approximate_kl(log_ratio, weight)
        outside = ((ratio - 1.0).abs() > clip).float()
        choice = evaluation.head_choice.float()
        head_entropy = evaluation.head_entropy
        if weight is not None:
            choice, head_entropy = choice * weight[..., None], head_entropy * weight[..., None]
        choices = choice.sum((0, 1))
        steps = float(ratio.numel()) if weight is None else weight.sum()
        metrics = {
            Metric.LOSS: loss.detach(),
            Metric.POLICY_LOSS: policy_loss,
            Metric.VALUE_LOSS: value_loss,
            Metric.ENTROPY: entropy,
            Metric.APPROX_KL: kl,
            Metric.CLIP_FRACTION: weighted_mean(outside, weight),
            Metric.RATIO_MAX: ratio.max(),
            Metric.RATIO_MIN: ratio.min(),
            Metric.RATIO_VARIANCE: weighted_mean((ratio - 1.0).square(), weight),
            Metric.HEAD_ENTROPY: head_entropy.sum((0, 1)) / choices.clamp(min=1.0),
            Metric.HEAD_CHOICE: choices / steps,
        }
    return loss, metrics


class _SurrogateLoss(torch.autograd.Function):
    """The surrogate loss with a closed-form gradient, in a third of autograd's operations.

    With r the importance ratio and A the advantage, ``d min(r A, clip(r) A) / d log r`` is ``r A``
    where ``r A <= clip(r) A``, and 0 elsewhere.
    """

    @staticmethod
    def forward(
        ctx: Any,
        log_prob: Tensor,
        head_entropy: Tensor,
        value: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        targets: Tensor,
        weights: tuple[Tensor | None, Tensor | None],
        clip: Tensor,
        entropy_weight: Tensor,
        value_weight: float | Tensor,
    ) -> tuple[Tensor, ...]:
        weight, critic_weight = weights
        log_ratio = log_prob - old_log_prob
        if weight is not None:  # log-probs of padding may overflow, to NaN in the sums
            log_ratio = torch.where(weight > 0, log_ratio, 0.0)
        ratio = log_ratio.exp()
        surrogate = ratio * advantages
        clipped_surrogate = torch.minimum(torch.maximum(ratio, 1.0 - clip), 1.0 + clip) * advantages
        error = value - targets
        policy_loss = -weighted_mean(torch.minimum(surrogate, clipped_surrogate), weight)
        value_loss = 0.5 * weighted_mean(error.square(), critic_weight)
        entropy = weighted_mean(head_entropy.sum(-1), weight)
        alike = entropy_weight.ndim == 0
        bonus = entropy_weight * entropy
        if not alike:
            bonus = weighted_mean((head_entropy * entropy_weight).sum(-1), weight)
        loss = policy_loss + value_weight * value_loss - bonus

        share = 1.0 / surrogate.numel() if weight is None else weight / weight.sum()
        d_log_prob = (surrogate * -share).masked_fill(surrogate > clipped_surrogate, 0.0)
        if alike:
            d_entropy = (-entropy_weight * share).expand(surrogate.shape)[..., None]
        else:
            steps = torch.as_tensor(share, device=ratio.device)[..., None]
            d_entropy = (-entropy_weight * steps).expand(head_entropy.shape)
        if critic_weight is not None and critic_weight is not weight:
            share = critic_weight / critic_weight.sum()
        ctx.save_for_backward(d_log_prob, d_entropy, error * (value_weight * share))
        ctx.heads = head_entropy.shape[-1]
        details = policy_loss, value_loss, entropy, log_ratio, ratio
        ctx.mark_non_differentiable(*details)
        ctx.set_materialize_grads(False)
        return loss, *details

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        d_log_prob, d_entropy, d_value = (scale * part for part in ctx.saved_tensors)
        d_heads = d_entropy.expand(*d_value.shape, ctx.heads)
        return d_log_prob, d_heads, d_value, *[None] * 7


log = logging.getLogger(__name__)

_COMPILERS = ("torch._dynamo.", "torch._functorch.", "torch._inductor.", "triton.")
"""Packages whose exceptions are the compiler's: they have no common base class."""


def resolve_mode(mode: str, device: torch.device) -> str:
    """The mode for ``device``: ``auto`` compiles on CUDA only, because it is slower on a CPU."""
    if mode == "auto":
        return "default" if device.type == "cuda" else "off"
    return mode


class CompiledLoss:
    """Compiles a policy's encoder and its loss as one graph each; the LSTM between them is eager.

    Compiling a function that calls ``nn.LSTM`` compiles only what comes before the LSTM and
    silently leaves the rest eager, so encoder and loss are compiled separately.

    Args:
        policy: policy whose encoder and heads are compiled.
        mode: ``off``, or a mode of ``torch.compile``.
    """

    def __init__(self, policy: Policy[Any], mode: str):
        self._policy = policy
        self.active = mode != "off"
        if self.active:
            self._encode = torch.compile(policy.encode, mode=mode)
            self._compiled_loss = torch.compile(self._loss_of, mode=mode)

    def loss(
        self,
        minibatch: Sequences[Any],
        clip: Tensor,
        entropy_weight: Tensor,
        value_weight: float | Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``ppo_loss`` of a minibatch and its metrics."""
        of_batch = minibatch.old_log_prob, minibatch.advantages, minibatch.targets, minibatch.weight
        loss_inputs = *of_batch, clip, entropy_weight, value_weight, minibatch.critic_weight
        if not self.active:
            evaluation = self._policy.evaluate_actions(
                minibatch.observation, minibatch.actions, minibatch.hidden
            )
            return ppo_loss(evaluation, *loss_inputs)
        encoding = self._encode(minibatch.observation)
        memory, _ = self._policy.run_lstm(encoding[0], minibatch.hidden)
        return self._compiled_loss(
            memory, encoding, minibatch.observation, minibatch.actions, *loss_inputs
        )

    def _loss_of(
        self,
        memory: Tensor,
        encoding: tuple[Tensor, ...],
        observation: Any,
        actions: Tensor,
        *loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        evaluation = self._policy.evaluate_heads(memory, encoding, observation, actions)
        return ppo_loss(evaluation, *loss_inputs)

    def disable(self, error: Exception) -> bool:
        """Continue without compilation after ``error``; false if it was already off."""
        if not self.active:
            return False
        log_uncompiled(error)
        self.active = False
        return True


def is_compiler_error(error: Exception) -> bool:
    """Whether ``error`` is of the compiler, and not of what it compiled.

    What fails for another reason would fail again without compilation, or hide a fault if not.
    """
    return any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__)


def log_uncompiled(error: Exception) -> None:
    """Log in one line that ``error`` ends compilation."""
    log.warning("compile: %s; continuing without compilation", first_line(error))
