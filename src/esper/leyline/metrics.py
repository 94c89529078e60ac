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

    POLICY_LOSS = _metric(
        "policy_loss",
        "clipped surrogate loss; in learning from records the loss of the policy's method",
    )
    VALUE_LOSS = _metric(
        "value_loss", "half the mean squared error of the critic on normalised returns"
    )
    ENTROPY = _metric("entropy", "entropy summed over the heads in use, in nats per decision")
    APPROX_KL = _metric(
        "approx_kl", "k3 estimate of the KL divergence from the policy before the update, in nats"
    )
    CLIP_FRACTION = _metric(
        "clip_fraction", "fraction of decisions whose importance ratio was outside the clip range"
    )
    RATIO_MAX = _metric("ratio_max", "largest importance ratio of any minibatch")
    RATIO_MIN = _metric("ratio_min", "smallest importance ratio of any minibatch")
    GRAD_NORM = _metric("grad_norm", "norm of the gradient of the policy before clipping")
    REFUSED = _metric("refused", "1 if the update was refused because a number was not finite")
    STOPPED = _metric("stopped", "1 if the update stopped early, because of target_kl or a refusal")
    FIRST_KL = _metric("first_kl", "approx_kl of the first minibatch; 0 up to rounding")
    FIRST_RATIO_MAX = _metric(
        "first_ratio_max", "ratio_max of the first minibatch; 1 up to rounding"
    )
    EXPLAINED_VARIANCE = _metric(
        "explained_variance", "fraction of the variance of the returns that the critic explains"
    )
    EXPLAINED_VARIANCE_WITHIN_STEP = _metric(
        "explained_variance_within_step", "explained variance among returns of the same time step"
    )
    RETURN_MEAN = _metric("return_mean", "mean return of the episodes")
    VALUE_MEAN = _metric("value_mean", "mean value that the critic predicted for the episodes")
    LEARNING_RATE = _metric("learning_rate", "learning rate of the policy's parameters")
    _metric(part_metric(LEARNING_RATE, "policy"), "same as learning_rate")
    _metric(part_metric(LEARNING_RATE, "value"), "learning rate of the critic's own parameters")
    ENTROPY_WEIGHT = _head_metric(
        "entropy_weight", "weight of the entropy of this head, where --entropy-per-head is given"
    )
    _metric(ENTROPY_WEIGHT, "weight of the entropy bonus")
    VALUE_WEIGHT = _metric("value_loss_weight", "weight of the value loss, while it warms up")
    CLIP = _metric("clip", "clip range of the importance ratio")
    LOSS = _metric("loss", "total loss that was minimised")
    RATIO_VARIANCE = _metric(
        "ratio_variance", "mean squared distance of the importance ratio from 1"
    )
    AMP_SCALE = _metric("amp_scale", "loss scale of mixed precision")
    LAG_KL = _metric(
        "lag_kl",
        "IMPALA: k3 estimate of the KL divergence of the policy before the update from the policy "
        "that acted, in nats; 0 up to rounding without a lag",
    )
    RHO_CLIP_FRACTION = _metric(
        "rho_clip_fraction",
        "IMPALA: fraction of decisions whose importance ratio was above rho_clip before the update",
    )
    NEGATIVE_LOG_LIKELIHOOD = _metric(
        "negative_log_likelihood",
        "learning from records: negative log-likelihood of the recorded actions, in nats per "
        "decision",
    )
    EXPECTED_GAIN = _metric(
        "expected_gain",
        "vine: return that the policy expects among the recorded episodes of a group, minus their "
        "mean, in standard deviations of the returns",
    )
    HELD_OUT_EXPECTED_GAIN = _metric(
        "held_out_expected_gain", "vine: expected_gain of the held-out episodes"
    )
    HELD_OUT_POLICY_LOSS = _metric(
        "held_out_policy_loss", "learning from records: policy_loss of the held-out episodes"
    )
    HELD_OUT_VALUE_LOSS = _metric(
        "held_out_value_loss", "learning from records: value_loss of the held-out episodes"
    )
    HELD_OUT_NEGATIVE_LOG_LIKELIHOOD = _metric(
        "held_out_negative_log_likelihood",
        "learning from records: negative_log_likelihood of the held-out episodes",
    )

    VERSION_LAG = _metric(
        "version_lag",
        "IMPALA with actors: mean number of updates by which the weights that acted were behind",
    )

    HEAD_GRAD_NORMS = _head_metric("head_grad_norms", "gradient norm of the head's own parameters")
    HEAD_ENTROPY = _head_metric(
        "head_entropy", "entropy in nats per decision in which the head had a choice"
    )
    HEAD_CHOICE = _head_metric(
        "head_choice", "fraction of decisions in which the head had a choice"
    )
    VALUE_GRAD_NORM = _metric(
        part_metric(HEAD_GRAD_NORMS, "value"), "gradient norm of the critic's own parameters"
    )
