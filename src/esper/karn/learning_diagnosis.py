"""One line that answers: is the policy learning, and if not, why?"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from esper.leyline.anomaly_kinds import Thresholds
from esper.leyline.metrics import Metric, part_metric

State = Literal[
    "learning", "learned", "learned to grow nothing", "not learning", "getting worse", "too early"
]

MIN_ROUNDS = 5
"""Rounds from which on a trend can be significant."""
LEVEL_ROUNDS = 10
"""Rounds without a trend from which on a curve has levelled off; fewer would miss most trends."""
SIGNIFICANT = 0.05
"""Largest p-value of a trend, two-sided."""
FAR_KL = 0.3
"""KL divergence of an update, in nats, that is far beyond any useful target."""
IDLE_KL = 1e-5
"""KL divergence of an update, in nats, that changes next to nothing."""
BLIND_CRITIC = 0.05
"""Explained variance below which the critic is no better than the mean return."""

Metrics = Mapping[str, float | None]
"""Metrics of one update by name; None where there was nothing to measure."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What a policy is judged by, one value per round.

    Attributes:
        name, unit: such as ``gain`` and `` points``.
        values: means over the environments; not finite where unknown.
    """

    name: str
    unit: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer in a word, and as a line that begins with it."""

    state: State
    text: str


def diagnose(
    curve: Curve, updates: Sequence[Metrics], fossilised: Sequence[float] = ()
) -> Verdict | None:
    """Judge a learner by the trend of its curve, and look for the cause in its latest updates.

    The trend is Kendall's rank correlation of value and round (Mann, "Nonparametric tests against
    trend", 1945), which needs no straight line and is not moved by single rounds. Rounds count as
    independent, so slow drift may pass for a trend. A curve that rose but has no trend in its
    second half has levelled off; one without a trend that began lower has learned, not steadily.

    Args:
        curve: gain, or return of a Gymnasium task.
        updates: metrics of the updates, in order.
        fossilised: mean number of fossilised seeds per episode of each round; empty if nothing
            grows.

    Returns:
        None for a policy that does not learn, and before the first complete round.
    """
    values = [value for value in curve.values if math.isfinite(value)]
    if not updates or not values:
        return None
    recent = updates[-max(3, math.ceil(len(updates) / 5)) :]
    failure = _first(recent, _refusals, _not_finite, _too_far)
    if len(values) < MIN_ROUNDS:
        text = f"too early to tell after {_rounds(len(values))}; a trend takes {MIN_ROUNDS}"
        return Verdict("too early", f"{text}; {failure}" if failure else text)
    fossils = fossilised[-len(recent) :]
    nothing = _nothing_kept(fossils)
    cause = failure or _first(recent, _collapse) or nothing
    cause = cause or _first(recent, _idle, _blind) or _noise(curve, values)
    span = _span(curve, values)
    trend = _trend(values)
    if nothing and not failure and (trend > 0 or (trend == 0 and _began_lower(values))):
        return Verdict("learned to grow nothing", f"learned to grow nothing: {span}; {nothing}")
    if trend > 0 and not failure:
        half = values[len(values) // 2 :]
        if len(half) >= LEVEL_ROUNDS and _trend(half) <= 0:
            since = len(values) - len(half) + 1
            return Verdict("learned", f"learned: {span}, without a trend since round {since}")
        return Verdict("learning", f"learning: {span}")
    if trend == 0 and not failure and _began_lower(values):
        return Verdict("learned", f"learned: {span}, but not steadily")
    if trend < 0:
        return Verdict("getting worse", f"getting worse: {span}; {cause}")
    if trend == 0:
        span = f"{curve.name} has no trend in {_rounds(len(values))}"
    return Verdict("not learning", f"not learning: {cause} ({span})")


def _trend(values: Sequence[float]) -> int:
    """1 if values rise, -1 if they fall, 0 if neither is significant."""
    if len(set(values)) == 1:
        return 0
    from scipy import stats  # takes most of a second, which a short run need not wait for

    correlation = stats.kendalltau(range(len(values)), values)
    return int(math.copysign(1, correlation.statistic)) if correlation.pvalue < SIGNIFICANT else 0


def _began_lower(values: Sequence[float]) -> bool:
    """Whether the first tenth of the rounds is below the others, by their ranks.

    A curve that rose at once and then sank a little has no trend.
    """
    part = max(3, math.ceil(len(values) / 10))
    from scipy import stats

    test = stats.mannwhitneyu(values[:part], values[part:], alternative="less")
    return bool(test.pvalue < SIGNIFICANT / 5)


def _span(curve: Curve, values: Sequence[float]) -> str:
    part = math.ceil(len(values) / 10)
    first, last = fmean(values[:part]), fmean(values[-part:])
    return f"{curve.name} from {first:+.3g} to {last:+.3g}{curve.unit} in {_rounds(len(values))}"


def _rounds(count: int) -> str:
    return f"{count} round" if count == 1 else f"{count} rounds"


def _first(recent: Sequence[Metrics], *causes: Callable[[Sequence[Metrics]], str]) -> str:
    """The first cause that applies; empty if none does."""
    return next((text for cause in causes if (text := cause(recent))), "")


def _mean(recent: Sequence[Metrics], metric: str) -> float:
    """Mean of the finite values of a metric; NaN if there are none."""
    values = [value for each in recent if (value := each.get(metric)) is not None]
    finite = [float(value) for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def _refusals(recent: Sequence[Metrics]) -> str:
    count = sum(bool(each.get(Metric.REFUSED)) for each in recent)
    if not count:
        return ""
    return (
        f"{count} of the last {len(recent)} updates were refused because a number was not finite: "
        "esper replay shows which; lower --learning-rate"
    )


def _not_finite(recent: Sequence[Metrics]) -> str:
    for metric in (Metric.POLICY_LOSS, Metric.VALUE_LOSS, Metric.GRAD_NORM):
        for each in recent:
            value = each.get(metric)
            if value is not None and not math.isfinite(value):
                return f"{metric} was not finite: lower --learning-rate"
    return ""


def _too_far(recent: Sequence[Metrics]) -> str:
    divergence = _mean(recent, Metric.APPROX_KL)
    if not divergence > FAR_KL:
        return ""
    return f"updates go too far, KL {divergence:.2g} nats each: lower --learning-rate"


def _collapse(recent: Sequence[Metrics]) -> str:
    bounds = Thresholds()
    head = part_metric(Metric.HEAD_ENTROPY, "op")
    if not math.isnan(_mean(recent, head)):
        choice = _mean(recent, part_metric(Metric.HEAD_CHOICE, "op"))
        if choice < bounds.entropy_choice:
            return "operations leave no choice: see --slots, --max-seeds and --strict-gates"
        entropy, what = _mean(recent, head), "the policy always chooses the same operation"
    else:
        entropy, what = _mean(recent, Metric.ENTROPY), "the policy always chooses the same action"
    if not entropy < bounds.entropy_collapse:
        return ""
    return f"{what}, entropy {entropy:.2g} nats: raise --entropy"


def _nothing_kept(fossilised: Sequence[float]) -> str:
    if not fossilised or any(fossilised):
        return ""
    return f"no seed was kept in the last {_rounds(len(fossilised))}: see esper tasks --describe"


def _idle(recent: Sequence[Metrics]) -> str:
    divergence = _mean(recent, Metric.APPROX_KL)
    if not divergence < IDLE_KL:
        return ""
    return f"updates change next to nothing, KL {divergence:.2g} nats: raise --learning-rate"


def _blind(recent: Sequence[Metrics]) -> str:
    variance = _mean(recent, Metric.EXPLAINED_VARIANCE)
    if not variance < BLIND_CRITIC:
        return ""
    return (
        f"the critic does not predict returns, explained variance {max(variance, -1.0):.2g}: more "
        "--rounds, or a larger --envs"
    )


def _noise(curve: Curve, values: Sequence[float]) -> str:
    if len(set(values)) == 1:
        return f"{curve.name} is the same in every round"
    return (
        f"no cause stands out, {curve.name} varies by {stdev(values):.2g}{curve.unit} from "
        "round to round: more --rounds, or a larger --envs"
    )
