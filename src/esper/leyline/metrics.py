"""The metrics of an update by name, with what they mean."""

from typing import Final

from esper.leyline.actions import HEADS

_OF_AN_UPDATE = {
    "policy_loss": "clipped surrogate loss",
    "value_loss": "half the mean squared error of the normalised value",
    "entropy": "summed over heads that matter, nats a decision",
    "approx_kl": "k3 estimate of the KL divergence from the policy that acted, nats",
    "clip_fraction": "share of decisions whose ratio was outside of the trust region",
    "ratio_max": "largest importance ratio of any minibatch",
    "ratio_min": "smallest importance ratio of any minibatch",
    "grad_norm": "norm of the policy's gradient before clipping",
    "refused": "share of minibatches refused because a number was not finite",
    "stopped": "1 where the KL bound ended the update early",
    "first_kl": "approx_kl of the first minibatch; 0 but for rounding",
    "first_ratio_max": "ratio_max of the first minibatch; 1 but for rounding",
    "explained_variance": "share of the variance of the returns that the critic explains",
    "explained_variance_within_step": "the same within a time step, which the time cannot explain",
    "return_mean": "mean return of the episodes",
    "value_mean": "what the critic expected of them",
    "learning_rate": "step size of the optimizer",
    "amp_scale": "loss scale of mixed precision",
}
_OF_A_HEAD = {
    "head_grad_norms": "norm of the gradient of the head's own parameters",
    "head_entropy": "entropy a decision in which the head had a choice, nats",
    "head_choice": "share of decisions in which the head had a choice",
}

METRICS: Final[dict[str, str]] = {
    **_OF_AN_UPDATE,
    **{f"{name}/{head}": text for name, text in _OF_A_HEAD.items() for head in HEADS},
    "head_grad_norms/value": "norm of the gradient of the critic's own parameters",
}
"""What an update may report: means over its minibatches where nothing else is said. One that a run
does not report is missing, which is not 0."""

PER_HEAD: Final[dict[str, str]] = _OF_A_HEAD
"""The metrics that exist once for each head, as ``NAME/HEAD``."""
