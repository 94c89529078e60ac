"""The governor of one environment in plain Python, written from its specification."""

import math
from dataclasses import dataclass, field
from typing import Any

from esper.tolaria.governor import Reason

HISTORY, EXPERIENCE, STRIKES = 20, 10, 3


@dataclass
class NaiveGovernor:
    """Judges one host and stores any object as its snapshot."""

    classes: int
    kept: Any = None
    history: list[float] = field(default_factory=list)
    strikes: int = 0
    healthy: bool = True

    def check(self, loss: float, others: list[float], expected: float) -> Reason:
        """DivergenceDetector a step; ``others`` are values that are only checked for finiteness."""
        runs_away, reason = False, Reason.NONE
        if not all(math.isfinite(number) for number in (loss, *others)):
            reason = Reason.NOT_FINITE
        elif len(self.history) >= EXPERIENCE:
            chance = math.log(self.classes)
            mean = sum(self.history) / len(self.history)
            variance = sum((x - mean) ** 2 for x in self.history) / len(self.history)
            learned, guesses = mean < 0.6 * chance, abs(loss - chance) < 0.065 * chance
            if learned and guesses and expected <= 1.25 / self.classes:
                reason = Reason.COLLAPSE
            runs_away = loss > max(12.0, mean + 6.0 * math.sqrt(variance), 3.0 * mean)
            if runs_away:
                self.strikes += 1
                if self.strikes == STRIKES:
                    reason = Reason.RUNAWAY
        if reason is not Reason.NONE or not runs_away:
            self.strikes = 0
        self.healthy = reason is Reason.NONE and not runs_away
        if self.healthy:
            self.history = [*self.history, loss][-HISTORY:]
        return reason
