"""Anomalies of learning: the kinds, and the thresholds that define them.

The anomaly detector and the views of its metrics use the same thresholds.
"""

from dataclasses import dataclass
from typing import Final

KINDS: Final[dict[str, str]] = {
    "ratio_explosion": "an action became far more probable than when it was chosen",
    "ratio_collapse": "an action became far less probable than when it was chosen",
    "value_collapse": "the critic is far worse than predicting the mean return",
    "entropy_collapse": "a head that has a choice almost always chooses the same option",
    "gradient_drift": "the gradient norm of the policy is far from its running mean",
    "gradient_vanishing": "the gradient is almost zero",
    "not_finite": "a number is NaN or infinite, or an update was refused because of one",
    "missing_gradient": "the parameters of a head received no gradient",
    "throughput_drop": "rounds take far longer than before",
}
"""Meaning of each kind of anomaly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds. The docstring of each field names the kinds of anomaly that use it."""

    ratio_explosion: float = 5.0
    """ratio_explosion: largest importance ratio of an update."""
    ratio_collapse: float = 0.1
    """ratio_collapse: smallest importance ratio of an update."""
    value_collapse: float = 5.0
    """value_collapse: value loss on normalised returns; predicting the mean gives 0.5."""
    entropy_collapse: float = 0.02
    """entropy_collapse: entropy in nats per decision in which the head had a choice."""
    entropy_choice: float = 0.005
    """entropy_collapse, gradient_vanishing: minimum fraction of decisions in which the head had a
    choice. If the fraction is not reported, entropy_collapse takes an entropy of exactly 0 to mean
    that the head had no choice, and gradient_vanishing leaves the head out."""
    gradient_drift: float = 8.0
    """gradient_drift: ratio, in either direction, of the fast to the slow mean of the norm; both
    means are geometric."""
    drift_fast: float = 0.5
    """gradient_drift: weight of the past in the fast exponential mean of the log of the norm."""
    drift_slow: float = 0.95
    """gradient_drift: weight of the past in the slow exponential mean of the log of the norm."""
    gradient_vanishing: float = 1e-7
    """gradient_vanishing: norm of the whole gradient, or of the gradient of a head that is known
    to have had a choice."""
    throughput_drop: float = 0.5
    """throughput_drop: minimum environment steps per second as a fraction of their exponential
    mean."""
    throughput_memory: float = 0.9
    """throughput_drop: weight of the past in the exponential mean of the throughput."""
    patience: int = 3
    """value_collapse, entropy_collapse, gradient_vanishing: consecutive updates before a report."""
    warmup: int = 5
    """gradient_drift, throughput_drop: rounds that establish the mean before the first report."""
