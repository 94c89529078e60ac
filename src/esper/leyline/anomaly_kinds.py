"""What counts as an anomaly of learning: the kinds, and the bounds of their numbers.

The detector of anomalies and the views of the numbers use the same bounds.
"""

from dataclasses import dataclass
from typing import Final

KINDS: Final[dict[str, str]] = {
    "ratio_explosion": "an action became far more probable than when it was taken",
    "ratio_collapse": "an action became far less probable than when it was taken",
    "value_collapse": "the critic is far worse than one that knows only the mean",
    "entropy_collapse": "a head that has a choice always chooses the same",
    "gradient_drift": "the policy's gradient is far from its own habit",
    "gradient_vanishing": "there is next to no gradient",
    "not_finite": "a number is NaN or infinite, or an update was refused for it",
    "missing_gradient": "a head has no gradient at all",
    "throughput_drop": "rounds take far longer than before",
}
"""The kinds of anomaly, with what they mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The bounds. Each field says which kind it is for."""

    ratio_explosion: float = 5.0
    """ratio_explosion: largest importance ratio of an update."""
    ratio_collapse: float = 0.1
    """ratio_collapse: smallest importance ratio of an update."""
    value_collapse: float = 5.0
    """value_collapse: value loss on normalised returns; to know the mean alone costs 0.5."""
    entropy_collapse: float = 0.02
    """entropy_collapse: nats a decision in which the head had a choice."""
    entropy_choice: float = 0.005
    """entropy_collapse: share of decisions in which the head must have had a choice. Where the
    share is not reported, an entropy of exactly 0 counts as forced."""
    gradient_drift: float = 8.0
    """gradient_drift: factor, up or down, between the fast and the slow mean of the norm."""
    drift_fast: float = 0.5
    """gradient_drift: weight of the past in the fast mean (exponential, of the log of the norm)."""
    drift_slow: float = 0.95
    """gradient_drift: weight of the past in the slow mean."""
    gradient_vanishing: float = 1e-7
    """gradient_vanishing: norm of the whole gradient, or of a head that is known to have a
    choice."""
    throughput_drop: float = 0.5
    """throughput_drop: share of the mean environment steps a second that must be kept."""
    throughput_memory: float = 0.9
    """throughput_drop: weight of the past in that mean (exponential)."""
    patience: int = 3
    """value_collapse, entropy_collapse, gradient_vanishing: updates in a row."""
    warmup: int = 5
    """gradient_drift, throughput_drop: rounds before there is a habit to compare with."""
