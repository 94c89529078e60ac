"""Health of each head of the policy, from the metrics of its updates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from esper.karn.sanctum.formatting import to_float
from esper.leyline.actions import HEADS
from esper.leyline.anomaly_kinds import Thresholds
from esper.leyline.events import Number, PPOUpdateCompleted
from esper.leyline.metrics import Metric, part_metric

ROWS = (*HEADS, "value")
"""The heads that are shown: the action heads, and the critic's ``value``."""

BOUNDS = Thresholds()
EXPLODING = 100.0
"""Gradient norm above which a head is shown as exploding. The anomaly detector has no such bound;
it compares a gradient norm with its running mean."""


class State(Enum):
    """Health of a head: a glyph and its name."""

    MISSING = "∅ missing"
    NOT_FINITE = "✖ not finite"
    EXPLODING = "▲ exploding"
    VANISHING = "▽ vanishing"
    COLLAPSED = "▬ collapsed"
    IDLE = "· no choice"
    HEALTHY = "● healthy"


@dataclass(frozen=True, slots=True)
class Head:
    """One head after the latest update.

    Attributes:
        name: name of the head.
        gradients: gradient norm in every update; None where it is missing.
        entropies: entropy in every update, nats per decision; empty for the critic.
        choice: share of decisions in which it had a choice; None where it was not recorded.
    """

    name: str
    gradients: Sequence[Number | None]
    entropies: Sequence[Number | None]
    choice: float | None

    @property
    def gradient(self) -> float | None:
        """Gradient norm in the last update; None where it is missing."""
        return to_float(self.gradients[-1])

    @property
    def entropy(self) -> float | None:
        """Entropy in the last update, nats; None where it is missing."""
        return to_float(self.entropies[-1]) if self.entropies else None

    @property
    def had_choice(self) -> bool:
        """Whether the head had a choice in the last update; without one it needs no gradient."""
        if self.choice is not None:
            return self.choice > 0
        return self.name == "value" or self.entropy != 0 or self.gradient != 0

    @property
    def state(self) -> State:
        """Health of the head: the worst state that applies."""
        gradient, entropy = self.gradient, self.entropy
        if gradient is None:
            return State.MISSING
        if not math.isfinite(gradient) or (entropy is not None and not math.isfinite(entropy)):
            return State.NOT_FINITE
        if not self.had_choice:
            return State.IDLE
        if gradient > EXPLODING:
            return State.EXPLODING
        if gradient < BOUNDS.gradient_vanishing:
            return State.VANISHING
        if entropy is not None and entropy < BOUNDS.entropy_collapse:
            return State.COLLAPSED
        return State.HEALTHY


def heads(updates: Sequence[PPOUpdateCompleted]) -> list[Head]:
    """Return the heads after the last of ``updates``, which must not be empty."""
    last = updates[-1].metrics
    return [
        Head(
            name,
            series(updates, part_metric(Metric.HEAD_GRAD_NORMS, name)),
            series(updates, part_metric(Metric.HEAD_ENTROPY, name)) if name != "value" else (),
            to_float(last.get(part_metric(Metric.HEAD_CHOICE, name))),
        )
        for name in ROWS
    ]


def series(updates: Sequence[PPOUpdateCompleted], name: str) -> list[Number | None]:
    """Return a metric of every update; None where an update does not have it."""
    return [update.metrics.get(name) for update in updates]
