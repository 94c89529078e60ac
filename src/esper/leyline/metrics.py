"""The metrics of an update by name, with what they mean: defined here, and named nowhere else."""

from collections.abc import Iterable
from typing import Final

from esper.leyline.actions import HEADS

METRICS: Final[dict[str, str]] = {}
"""What an update of a growth policy may report and what it means: means over its minibatches where
nothing else is stated. One that an update does not report is missing, which is not 0."""

PER_HEAD: Final[dict[str, str]] = {}
"""The metrics that exist once for each head, as ``NAME/HEAD``."""


def _metric(name: str, meaning: str) -> str:
    METRICS[name] = meaning
    return name


def _head_metric(name: str, meaning: str) -> str:
    PER_HEAD[name] = meaning
    METRICS.update({part_metric(name, head): meaning for head in HEADS})
    return name


def part_metric(name: str, part: str) -> str:
    """The metric ``name`` of one head or one group of parameters."""
    return f"{name}/{part}"


def parts_of(name: str, metrics: Iterable[str]) -> dict[str, str]:
    """Those of ``metrics`` that are ``name`` of one head or group, with that head or group."""
    return {m: m.removeprefix(f"{name}/") for m in metrics if m.startswith(f"{name}/")}


class Metric:
    """Names of metrics, as they stand in ``PPOUpdateCompleted.metrics``."""

    POLICY_LOSS: Final = _metric("policy_loss", "clipped surrogate loss")
    VALUE_LOSS: Final = _metric("value_loss", "half the mean squared error of the normalised value")
    ENTROPY: Final = _metric("entropy", "summed over heads that matter, nats a decision")
    APPROX_KL: Final = _metric(
        "approx_kl", "k3 estimate of the KL divergence from the policy that acted, nats"
    )
    CLIP_FRACTION: Final = _metric(
        "clip_fraction", "share of decisions whose ratio was outside of the trust region"
    )
    RATIO_MAX: Final = _metric("ratio_max", "largest importance ratio of any minibatch")
    RATIO_MIN: Final = _metric("ratio_min", "smallest importance ratio of any minibatch")
    GRAD_NORM: Final = _metric("grad_norm", "norm of the policy's gradient before clipping")
    REFUSED: Final = _metric("refused", "1 where learning ended because a number was not finite")
    STOPPED: Final = _metric("stopped", "1 where the KL bound ended the update early")
    FIRST_KL: Final = _metric("first_kl", "approx_kl of the first minibatch; 0 but for rounding")
    FIRST_RATIO_MAX: Final = _metric(
        "first_ratio_max", "ratio_max of the first minibatch; 1 but for rounding"
    )
    EXPLAINED_VARIANCE: Final = _metric(
        "explained_variance", "share of the variance of the returns that the critic explains"
    )
    EXPLAINED_VARIANCE_WITHIN_STEP: Final = _metric(
        "explained_variance_within_step",
        "the same within a time step, which the time cannot explain",
    )
    RETURN_MEAN: Final = _metric("return_mean", "mean return of the episodes")
    VALUE_MEAN: Final = _metric("value_mean", "what the critic expected of them")
    LEARNING_RATE: Final = _metric("learning_rate", "step size of the policy's parameters")
    LEARNING_RATE_POLICY: Final = _metric(part_metric(LEARNING_RATE, "policy"), "the same")
    LEARNING_RATE_VALUE: Final = _metric(
        part_metric(LEARNING_RATE, "value"), "step size of the critic's own parameters"
    )
    ENTROPY_WEIGHT: Final = _metric("entropy_weight", "weight of the entropy bonus")
    CLIP: Final = _metric("clip", "bound of the importance ratio")
    LOSS: Final = _metric("loss", "what was minimised")
    RATIO_VARIANCE: Final = _metric(
        "ratio_variance", "mean square of the importance ratio's distance from 1"
    )
    AMP_SCALE: Final = _metric("amp_scale", "loss scale of mixed precision")

    HEAD_GRAD_NORMS: Final = _head_metric(
        "head_grad_norms", "norm of the gradient of the head's own parameters"
    )
    HEAD_ENTROPY: Final = _head_metric(
        "head_entropy", "entropy a decision in which the head had a choice, nats"
    )
    HEAD_CHOICE: Final = _head_metric(
        "head_choice", "share of decisions in which the head had a choice"
    )
    VALUE_GRAD_NORM: Final = _metric(
        part_metric(HEAD_GRAD_NORMS, "value"), "norm of the gradient of the critic's own parameters"
    )
