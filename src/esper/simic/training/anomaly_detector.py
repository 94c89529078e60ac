"""Detection of anomalies in learning from the events of updates and rounds.

Kinds and bounds are in ``leyline.anomaly_kinds``. An anomaly is reported when it begins, and again
only after its numbers have been within their bounds. A metric that an update does not report counts
as unknown, not as 0.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from esper.leyline.actions import HEADS
from esper.leyline.anomaly_kinds import Thresholds
from esper.leyline.events import (
    AnalyticsSnapshot,
    AnomalyDetected,
    Number,
    PPOUpdateCompleted,
    number,
)
from esper.leyline.metrics import Metric, part_metric, parts_of


@dataclass(frozen=True, slots=True)
class _Finding:
    """A number out of its bounds; an anomaly if found in ``patience`` consecutive rounds."""

    kind: str
    metric: str
    value: float | None
    threshold: float | None
    message: str
    patience: int = 1


class AnomalyDetector:
    """Examines the events of a run, round by round.

    Args:
        thresholds: bounds, the defaults if None.
    """

    def __init__(self, thresholds: Thresholds | None = None):
        self.thresholds = thresholds or Thresholds()
        self._in_a_row: Counter[tuple[str, str]] = Counter()
        self._updates = self._rounds = 0
        self._fast = self._slow = self._speed = 0.0

    def observe(
        self, update: PPOUpdateCompleted | None, snapshot: AnalyticsSnapshot
    ) -> list[AnomalyDetected]:
        """The anomalies that began in a round.

        Args:
            update: the round's update; None if the policy does not learn.
            snapshot: the round's snapshot.
        """
        findings = [*self._throughput(snapshot.environment_steps_per_second)]
        if update is not None:
            findings += self._update_findings(update.metrics)
        before = self._in_a_row
        self._in_a_row = Counter(
            {(f.kind, f.metric): before[f.kind, f.metric] + 1 for f in findings}
        )
        return [
            _as_event(finding, snapshot)
            for finding in findings
            if self._in_a_row[finding.kind, finding.metric] == finding.patience
        ]

    def _update_findings(self, metrics: dict[str, Number | None]) -> Iterator[_Finding]:
        numbers = {name: float(value) for name, value in metrics.items() if value is not None}
        yield from _missing(metrics)
        yield from _not_finite(numbers)
        yield from self._ratio(numbers)
        yield from self._value(numbers)
        yield from self._entropy(numbers)
        yield from self._vanishing(numbers)
        yield from self._drift(numbers)

    def _ratio(self, numbers: dict[str, float]) -> Iterator[_Finding]:
        most, least = self.thresholds.ratio_explosion, self.thresholds.ratio_collapse
        high, low = numbers.get(Metric.RATIO_MAX, 1.0), numbers.get(Metric.RATIO_MIN, 1.0)
        if high > most:
            message = f"an action became {high:.3g} times as probable within one update"
            yield _Finding("ratio_explosion", Metric.RATIO_MAX, high, most, message)
        if low < least:
            message = f"an action fell to {low:.3g} of its probability within one update"
            yield _Finding("ratio_collapse", Metric.RATIO_MIN, low, least, message)

    def _value(self, numbers: dict[str, float]) -> Iterator[_Finding]:
        bounds, loss = self.thresholds, numbers.get(Metric.VALUE_LOSS, 0.0)
        if loss > bounds.value_collapse:
            message = (
                f"value loss is {loss:.3g}, above {bounds.value_collapse:g} for {bounds.patience} "
                "updates; predicting the mean gives 0.5"
            )
            yield _Finding(
                "value_collapse", Metric.VALUE_LOSS, loss, bounds.value_collapse, message,
                bounds.patience,
            )  # fmt: skip

    def _entropy(self, numbers: dict[str, float]) -> Iterator[_Finding]:
        bounds = self.thresholds
        for head in HEADS:
            metric = part_metric(Metric.HEAD_ENTROPY, head)
            entropy = numbers.get(metric, math.inf)
            if entropy < bounds.entropy_collapse and self._has_choice(head, entropy, numbers):
                rate = f"{entropy:.2g} nats per decision with a choice"
                message = f"head {head} no longer explores: {rate}"
                yield _Finding(
                    "entropy_collapse", metric, entropy, bounds.entropy_collapse, message,
                    bounds.patience,
                )  # fmt: skip

    def _has_choice(self, head: str, entropy: float, numbers: dict[str, float]) -> bool:
        """Whether the head had several legal options often enough to judge its entropy."""
        share = numbers.get(part_metric(Metric.HEAD_CHOICE, head))
        return entropy > 0.0 if share is None else share >= self.thresholds.entropy_choice

    def _vanishing(self, numbers: dict[str, float]) -> Iterator[_Finding]:
        bounds = self.thresholds
        norms = [Metric.GRAD_NORM]
        norms += [
            part_metric(Metric.HEAD_GRAD_NORMS, head)
            for head in HEADS
            if numbers.get(part_metric(Metric.HEAD_CHOICE, head), 0.0) >= bounds.entropy_choice
        ]
        for metric in norms:
            norm = numbers.get(metric, math.inf)
            if norm < bounds.gradient_vanishing:
                least = f"{bounds.gradient_vanishing:g} for {bounds.patience} updates"
                message = f"{metric} is {norm:.2g}, below {least}"
                yield _Finding(
                    "gradient_vanishing", metric, norm, bounds.gradient_vanishing, message,
                    bounds.patience,
                )  # fmt: skip

    def _drift(self, numbers: dict[str, float]) -> Iterator[_Finding]:
        bounds, norm = self.thresholds, numbers.get(Metric.GRAD_NORM, math.nan)
        if not (math.isfinite(norm) and norm > 0.0):
            return
        level = math.log(norm)
        if self._updates == 0:
            self._fast = self._slow = level
        self._fast += (1.0 - bounds.drift_fast) * (level - self._fast)
        gap = self._fast - self._slow
        self._slow += (1.0 - bounds.drift_slow) * (level - self._slow)
        self._updates += 1
        if self._updates > bounds.warmup and abs(gap) > math.log(bounds.gradient_drift):
            side = "above" if gap > 0 else "below"
            factor = math.exp(abs(gap))
            message = f"the gradient norm is a factor of {factor:.3g} {side} its running mean"
            most = bounds.gradient_drift
            yield _Finding("gradient_drift", Metric.GRAD_NORM, factor, most, message)

    def _throughput(self, speed: float) -> Iterator[_Finding]:
        bounds, mean = self.thresholds, self._speed
        if not (math.isfinite(speed) and speed > 0.0):
            return
        self._rounds += 1
        low = self._rounds > bounds.warmup and speed < bounds.throughput_drop * mean
        # The first round includes one-time set-up, so the mean starts with the second round.
        weight = bounds.throughput_memory if self._rounds > 2 else 0.0
        self._speed = weight * mean + (1.0 - weight) * speed
        if low:
            message = f"{speed:.3g} environment steps per second; the running mean was {mean:.3g}"
            least = bounds.throughput_drop * mean
            metric = "environment_steps_per_second"
            yield _Finding("throughput_drop", metric, speed, least, message)


def _missing(metrics: dict[str, Number | None]) -> Iterator[_Finding]:
    for metric, head in parts_of(Metric.HEAD_GRAD_NORMS, metrics).items():
        if metrics[metric] is None:
            message = f"head {head} has no gradient"
            yield _Finding("missing_gradient", metric, None, None, message)


def _not_finite(numbers: dict[str, float]) -> Iterator[_Finding]:
    """Metrics that are not finite.

    Explained variance is exempt: if all returns are equal, it is NaN or minus infinity.
    """
    for metric, value in numbers.items():
        if not math.isfinite(value) and not metric.startswith(Metric.EXPLAINED_VARIANCE):
            yield _Finding("not_finite", metric, value, None, f"{metric} is {number(value)}")
    refusal = numbers.get(Metric.REFUSED, 0.0)
    if refusal > 0.0:
        message = "the update was refused: a number was not finite"
        yield _Finding("not_finite", Metric.REFUSED, refusal, 0.0, message)


def _as_event(finding: _Finding, snapshot: AnalyticsSnapshot) -> AnomalyDetected:
    return AnomalyDetected(
        time=snapshot.time,
        round=snapshot.round,
        kind=finding.kind,
        metric=finding.metric,
        value=None if finding.value is None else number(finding.value),
        threshold=finding.threshold,
        message=finding.message,
        amp_enabled=snapshot.amp_enabled,
        amp_dtype=snapshot.amp_dtype,
        amp_scale=snapshot.amp_scale,
        amp_policy_dtype=snapshot.amp_policy_dtype,
        amp_policy_scale=snapshot.amp_policy_scale,
    )
