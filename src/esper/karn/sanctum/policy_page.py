"""The second page: health of the policy's heads, metrics of its updates, and plots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Grid

from esper.karn.learning_diagnosis import BLIND_CRITIC, MIN_ROUNDS
from esper.karn.sanctum.signs import Palette, compact, number_text, sparkline, to_float, trend
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.widgets import Curve, Lines, Plot, View
from esper.leyline.actions import HEADS
from esper.leyline.anomaly_kinds import Thresholds
from esper.leyline.events import Number, PPOUpdateCompleted
from esper.leyline.metrics import Metric, part_metric, parts_of

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
    COLLAPSE = "▬ collapsed"
    BLIND = "○ blind"
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
        explained_variance: of the critic, once there are ``MIN_ROUNDS`` updates; None else.
    """

    name: str
    gradients: Sequence[Number | None]
    entropies: Sequence[Number | None]
    choice: float | None
    explained_variance: float | None = None

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
            return State.COLLAPSE
        if self.explained_variance is not None and self.explained_variance < BLIND_CRITIC:
            return State.BLIND
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
            to_float(last.get(Metric.EXPLAINED_VARIANCE))
            if name == "value" and len(updates) >= MIN_ROUNDS
            else None,
        )
        for name in ROWS
    ]


def series(updates: Sequence[PPOUpdateCompleted], name: str) -> list[Number | None]:
    """Return a metric of every update; None where an update does not have it."""
    return [update.metrics.get(name) for update in updates]


RECENT = 200
"""Number of latest updates that the tables read; more than the longest sparkline shows."""

SCALARS = (
    ("policy loss", Metric.POLICY_LOSS),
    ("value loss", Metric.VALUE_LOSS),
    ("approximate KL", Metric.APPROX_KL),
    ("clip fraction", Metric.CLIP_FRACTION),
    ("ratio max", Metric.RATIO_MAX),
    ("ratio min", Metric.RATIO_MIN),
    ("explained var.", Metric.EXPLAINED_VARIANCE),
    ("  within a step", Metric.EXPLAINED_VARIANCE_WITHIN_STEP),
    ("entropy", Metric.ENTROPY),
    ("gradient norm", Metric.GRAD_NORM),
    ("return mean", Metric.RETURN_MEAN),
    ("value mean", Metric.VALUE_MEAN),
    ("updates refused", Metric.REFUSED),
    ("KL stop", Metric.STOPPED),
)
"""Metrics that are shown besides those of the heads, two per line."""

PLOTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("loss", "loss", (("policy", Metric.POLICY_LOSS), ("value", Metric.VALUE_LOSS))),
    ("kl", "trust region", (("KL", Metric.APPROX_KL), ("clip fraction", Metric.CLIP_FRACTION))),
    ("variance", "explained variance",
     (("overall", Metric.EXPLAINED_VARIANCE),
      ("in a step", Metric.EXPLAINED_VARIANCE_WITHIN_STEP))),
    ("entropy", "entropy, nats", (("entropy", Metric.ENTROPY),)),
    ("gradient", "gradient norm before clipping", (("norm", Metric.GRAD_NORM),)),
    ("rate", "learning rate", (("LR", Metric.LEARNING_RATE),)),
)  # fmt: skip
"""Id, title and curves of each plot."""

_STYLES = dict.fromkeys(State, "bad") | {
    State.VANISHING: "warning",
    State.COLLAPSE: "warning",
    State.BLIND: "warning",
    State.IDLE: "muted",
    State.HEALTHY: "good",
}


class Policy(View):
    """The page of the policy."""

    title = "policy"

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scalars = Lines(id="policy-heads"), Lines(id="policy-scalars")
        self.grid = Grid(id="policy-plots", classes="tall-only")
        self.plots = {name: Plot(title, id=f"policy-{name}") for name, title, _ in PLOTS}

    def compose(self) -> ComposeResult:
        yield from (self.heads, self.scalars)
        with self.grid:
            yield from self.plots.values()

    def draw(self, moment: Moment, palette: Palette) -> None:
        updates = moment.updates
        if not updates:
            self.heads.show(Text("no policy update yet", style=palette.muted))
            self.scalars.show(Text())
            return
        self.heads.show(head_table(updates, palette, self.size.width))
        scalars = scalar_table(updates, palette, self.size.width)
        scalars.append(f"\nlearning rate  {learning_rate(moment) or 'missing'}")
        scalars.append(_schedule(moment), style=palette.muted)
        self.scalars.show(scalars)
        if self.grid.display:
            self._show_plots(updates, palette)

    def _show_plots(self, updates: Sequence[PPOUpdateCompleted], palette: Palette) -> None:
        numbers = [float(update.update) for update in updates]
        looks = ((palette.grown, "braille"), (palette.twin, "·"))
        for name, _, lines in PLOTS:
            curves = [
                Curve(label, series(updates, metric), *look)
                for (label, metric), look in zip(lines, looks, strict=False)
            ]
            self.plots[name].show(numbers, curves)


def learning_rate(moment: Moment) -> str | None:
    """Return the learning rate of the last update as text; None where none was recorded."""
    metrics = moment.updates[-1].metrics if moment.updates else {}
    if Metric.LEARNING_RATE in metrics:
        return number_text(metrics[Metric.LEARNING_RATE], ".3g")
    if moment.snapshots and moment.snapshots[-1].learning_rate is not None:
        return number_text(moment.snapshots[-1].learning_rate, ".3g")
    return None


def _schedule(moment: Moment) -> str:
    """Learning rates per group, entropy weight and clip range, where the run reports them."""
    metrics = moment.updates[-1].metrics
    labels = dict(parts_of(Metric.LEARNING_RATE, metrics))
    labels |= {Metric.ENTROPY_WEIGHT: "entropy weight", Metric.CLIP: "clip"}
    labels |= {Metric.VALUE_WEIGHT: "value weight"}
    labels |= {
        name: f"entropy of {head}"
        for name, head in parts_of(Metric.ENTROPY_WEIGHT, metrics).items()
    }
    return "".join(
        f"  {label} {number_text(metrics[name], '.3g')}"
        for name, label in labels.items()
        if name in metrics
    )


def head_table(updates: Sequence[PPOUpdateCompleted], palette: Palette, width: int) -> Text:
    """Return entropy, gradient norm, its trend and the state of every head, one line per head."""
    recent = updates[-RECENT:]
    spark = max(8, min(40, (width - 61) // 2))
    text = Text(no_wrap=True, overflow="ellipsis")
    number = f"update {updates[-1].update}"
    heading = (
        f"{number:<13}{'entropy':>9} {'':<{spark}} {'gradient norm':>13}   {'':<{spark}} "
        f"{'choice':>6}  state"
    )
    text.append(heading, style=palette.muted)
    for head in heads(recent):
        text.append("\n").append_text(_head_line(head, spark, palette))
    return text


def _head_line(head: Head, spark: int, palette: Palette) -> Text:
    style = getattr(palette, _STYLES[head.state])
    is_broken = head.state in (State.MISSING, State.NOT_FINITE)
    entropy = compact(head.entropies[-1]) if head.entropies else ""
    choice = "" if head.choice is None else f"{100 * head.choice:.0f} %"
    return Text.assemble(
        (f"{head.name:<13}", "bold"),
        f"{entropy:>9} ",
        (f"{sparkline(head.entropies, spark):<{spark}} ", palette.twin),
        (f"{compact(head.gradients[-1]):>13} ", style if is_broken else ""),
        f"{trend(head.gradients)} ",
        (f"{sparkline(head.gradients, spark):<{spark}} ", palette.grown),
        (f"{choice:>6}  ", palette.muted),
        (head.state.value, style),
    )


def scalar_table(updates: Sequence[PPOUpdateCompleted], palette: Palette, width: int) -> Text:
    """Return losses and other metrics with sparklines, two per line."""
    recent = updates[-RECENT:]
    scalars = [(label, name) for label, name in SCALARS if name in updates[-1].metrics]
    half = max(38, min(78, width // 2))
    text = Text(no_wrap=True, overflow="ellipsis")
    for i, (label, name) in enumerate(scalars):
        text.append("\n" if i % 2 == 0 else " ")
        text.append_text(_scalar(label, series(recent, name), half - 1, palette))
    return text


def _scalar(label: str, values: Sequence[Number | None], width: int, palette: Palette) -> Text:
    room = max(4, width - 29)
    return Text.assemble(
        (f"{label:<15} ", palette.muted),
        (f"{compact(values[-1]):>9} ", "bold"),
        f"{trend(values)} ",
        (f"{sparkline(values, room):<{room}}", palette.grown),
    )
