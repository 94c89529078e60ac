"""Names and meanings of the metrics of an update; no other module spells these names."""

from collections.abc import Iterable
from typing import Final

from esper.leyline.actions import HEADS

METRICS: Final[dict[str, str]] = {}
"""Meaning of each metric that an update of a growth policy may report: a mean over its minibatches
unless stated otherwise. A metric that an update does not report is missing, not 0."""

PER_HEAD: Final[dict[str, str]] = {}
"""Metrics that are reported per head, as ``NAME/HEAD``."""


def _metric(name: str, meaning: str) -> str:
    METRICS[name] = meaning
    return name


def _head_metric(name: str, meaning: str) -> str:
    PER_HEAD[name] = meaning
    METRICS.update({part_metric(name, head): meaning for head in HEADS})
    return name


def part_metric(name: str, part: str) -> str:
    """The name of the metric ``name`` for one head or one parameter group."""
    return f"{name}/{part}"


def parts_of(name: str, metrics: Iterable[str]) -> dict[str, str]:
    """The names ``name/PART`` in ``metrics``, each with its part: a head or a parameter group."""
    return {m: m.removeprefix(f"{name}/") for m in metrics if m.startswith(f"{name}/")}


class Metric:
    """Names of metrics, as used in ``PPOUpdateCompleted.metrics``."""

    POLICY_LOSS: Final = _metric(
        "policy_loss",
        "clipped surrogate loss; in learning from records the loss of the policy's method",
    )
    VALUE_LOSS: Final = _metric(
        "value_loss", "half the mean squared error of the critic on normalised returns"
    )
    ENTROPY: Final = _metric(
        "entropy", "entropy summed over the heads in use, in nats per decision"
    )
    APPROX_KL: Final = _metric(
        "approx_kl", "k3 estimate of the KL divergence from the policy before the update, in nats"
    )
    CLIP_FRACTION: Final = _metric(
        "clip_fraction", "fraction of decisions whose importance ratio was outside the clip range"
    )
    RATIO_MAX: Final = _metric("ratio_max", "largest importance ratio of any minibatch")
    RATIO_MIN: Final = _metric("ratio_min", "smallest importance ratio of any minibatch")
    GRAD_NORM: Final = _metric("grad_norm", "norm of the gradient of the policy before clipping")
    REFUSED: Final = _metric(
        "refused", "1 if the update was refused because a number was not finite"
    )
    STOPPED: Final = _metric(
        "stopped", "1 if the update stopped early, because of target_kl or a refusal"
    )
    FIRST_KL: Final = _metric("first_kl", "approx_kl of the first minibatch; 0 up to rounding")
    FIRST_RATIO_MAX: Final = _metric(
        "first_ratio_max", "ratio_max of the first minibatch; 1 up to rounding"
    )
    EXPLAINED_VARIANCE: Final = _metric(
        "explained_variance", "fraction of the variance of the returns that the critic explains"
    )
    EXPLAINED_VARIANCE_WITHIN_STEP: Final = _metric(
        "explained_variance_within_step",
        "explained variance among returns of the same time step",
    )
    RETURN_MEAN: Final = _metric("return_mean", "mean return of the episodes")
    VALUE_MEAN: Final = _metric(
        "value_mean", "mean value that the critic predicted for the episodes"
    )
    LEARNING_RATE: Final = _metric("learning_rate", "learning rate of the policy's parameters")
    _metric(part_metric(LEARNING_RATE, "policy"), "same as learning_rate")
    _metric(part_metric(LEARNING_RATE, "value"), "learning rate of the critic's own parameters")
    ENTROPY_WEIGHT: Final = _metric("entropy_weight", "weight of the entropy bonus")
    CLIP: Final = _metric("clip", "clip range of the importance ratio")
    LOSS: Final = _metric("loss", "total loss that was minimised")
    RATIO_VARIANCE: Final = _metric(
        "ratio_variance", "mean squared distance of the importance ratio from 1"
    )
    AMP_SCALE: Final = _metric("amp_scale", "loss scale of mixed precision")
    LAG_KL: Final = _metric(
        "lag_kl",
        "IMPALA: k3 estimate of the KL divergence of the policy before the update from the policy "
        "that acted, in nats; 0 up to rounding without a lag",
    )
    RHO_CLIP_FRACTION: Final = _metric(
        "rho_clip_fraction",
        "IMPALA: fraction of decisions whose importance ratio was above rho_clip before the update",
    )
    NEGATIVE_LOG_LIKELIHOOD: Final = _metric(
        "negative_log_likelihood",
        "learning from records: negative log-likelihood of the recorded actions, in nats per "
        "decision",
    )
    EXPECTED_GAIN: Final = _metric(
        "expected_gain",
        "vine: return that the policy expects among the recorded episodes of a group, minus their "
        "mean, in standard deviations of the returns",
    )
    HELD_OUT_EXPECTED_GAIN: Final = _metric(
        "held_out_expected_gain", "vine: expected_gain of the held-out episodes"
    )
    HELD_OUT_POLICY_LOSS: Final = _metric(
        "held_out_policy_loss", "learning from records: policy_loss of the held-out episodes"
    )
    HELD_OUT_VALUE_LOSS: Final = _metric(
        "held_out_value_loss", "learning from records: value_loss of the held-out episodes"
    )
    HELD_OUT_NEGATIVE_LOG_LIKELIHOOD: Final = _metric(
        "held_out_negative_log_likelihood",
        "learning from records: negative_log_likelihood of the held-out episodes",
    )

    VERSION_LAG: Final = _metric(
        "version_lag",
        "IMPALA with actors: mean number of updates by which the weights that acted were behind",
    )

    HEAD_GRAD_NORMS: Final = _head_metric(
        "head_grad_norms", "gradient norm of the head's own parameters"
    )
    HEAD_ENTROPY: Final = _head_metric(
        "head_entropy", "entropy in nats per decision in which the head had a choice"
    )
    HEAD_CHOICE: Final = _head_metric(
        "head_choice", "fraction of decisions in which the head had a choice"
    )
    VALUE_GRAD_NORM: Final = _metric(
        part_metric(HEAD_GRAD_NORMS, "value"), "gradient norm of the critic's own parameters"
    )
