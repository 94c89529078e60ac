"""How each head of the policy does, from the metrics of its updates."""

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
"""The heads that are shown: those of the action, and the critic's."""

BOUNDS = Thresholds()
EXPLODING = 100.0
"""Gradient norm above which a head is shown as exploding. The detector has no such bound: it
compares a norm with its own habit."""


class State(Enum):
    """How a head does; the glyph stands before the word."""

    MISSING = "∅ missing"
    NOT_FINITE = "✖ not finite"
    EXPLODING = "▲ exploding"
    VANISHING = "▽ vanishing"
    COLLAPSED = "▬ collapsed"
    IDLE = "· no choice"
    HEALTHY = "● healthy"


@dataclass(frozen=True, slots=True)
class Head:
    """One head after the last update.

    Attributes:
        name: its name.
        gradients: gradient norm of every update, None where it is missing.
        entropies: nats a decision, likewise; empty for the critic.
        choice: decisions in which it could choose, as a share; None where that was not recorded.
    """

    name: str
    gradients: Sequence[Number | None]
    entropies: Sequence[Number | None]
    choice: float | None

    @property
    def gradient(self) -> float | None:
        """Gradient norm of the last update; None where it is missing."""
        return to_float(self.gradients[-1])

    @property
    def entropy(self) -> float | None:
        """Entropy in the last update, nats; None where it is missing."""
        return to_float(self.entropies[-1]) if self.entropies else None

    @property
    def had_choice(self) -> bool:
        """Whether the head ever decided anything; a head without a choice owes no gradient."""
        if self.choice is not None:
            return self.choice > 0
        return self.name == "value" or self.entropy != 0 or self.gradient != 0

    @property
    def state(self) -> State:
        """How it does; the worst that holds."""
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
    """The heads after the last of ``updates``, which must not be empty."""
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
    """A metric of every update; None where an update has no such metric."""
    return [update.metrics.get(name) for update in updates]
