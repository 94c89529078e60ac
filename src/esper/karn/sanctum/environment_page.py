"""The third page: accuracy, seeds and decisions of one environment over its episode."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from esper.karn.sanctum.signs import (
    GLYPHS,
    Palette,
    count,
    difference_text,
    gauge,
    number_text,
    op_name,
    stage_name,
    to_float,
)
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.widgets import TICK_WIDTH, WIDE, Column, Curve, Lines, Plot, RowsTable, View
from esper.leyline.actions import CHOICES, HEADS, RELEVANT_HEADS, Op
from esper.leyline.events import DecisionsMade, EpochCompleted, to_floats
from esper.leyline.stages import ACTING, COMPUTING, LIVING

_BEFORE = {"tempo": "in ", "alpha_target": "to ", "alpha_speed": "within "}
"""Words before the options of these heads."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision; the last four attributes are empty before schema 3.

    Attributes:
        step: step of the episode, from 1.
        op: name of the operation.
        choice: slot, and the choices of the other heads that the op uses.
        success: whether the op was legal and therefore took effect.
        probability: probability of the op; None where the policy has no probabilities.
        legal: probability of every legal op.
        log_prob: log-probability of the whole action.
        value: the critic's value estimate, in units of the normalised return.
    """

    step: int
    op: str
    choice: str
    success: bool
    probability: float | None = None
    legal: Mapping[int, float | None] = field(default_factory=dict)
    log_prob: float | None = None
    value: float | None = None


def columns(palette: Palette) -> list[Column[Decision]]:
    """Return the columns of a table of decisions."""

    def quiet(decision: Decision, text: str) -> Text:
        return Text(text, style=palette.muted if decision.op == "wait" else "")

    def chance(decision: Decision) -> str:
        return "-" if decision.probability is None else f"{100 * decision.probability:.0f} %"

    def effect(decision: Decision) -> Text:
        if decision.op == "wait":
            return Text("")
        return Text("✓", palette.good) if decision.success else Text("✗ none", palette.bad)

    return [
        Column("step", 4, lambda decision: str(decision.step), right=True),
        Column("decision", 10, lambda decision: quiet(decision, decision.op)),
        Column("chance", 6, chance, right=True),
        Column("effect", 6, effect),
        Column("where and what", 46, lambda decision: quiet(decision, decision.choice)),
    ]


def decisions(moment: Moment, steps: Sequence[EpochCompleted], environment: int) -> list[Decision]:
    """Return the decisions of an episode so far, newest first."""
    names = moment.slot_names(environment, len(steps[-1].stage[environment]))
    events = {event.step: event for event in moment.decisions(steps[-1].round)}
    return [_decision(moment, s, events.get(s.step), environment, names) for s in reversed(steps)]


def _decision(
    moment: Moment,
    step: EpochCompleted,
    event: DecisionsMade | None,
    environment: int,
    names: Sequence[str],
) -> Decision:
    op, slot = step.op[environment], step.slot[environment]
    where = "" if op == Op.WAIT else (names[slot] if slot < len(names) else f"slot {slot}")
    success = step.success[environment]
    if event is None:
        return Decision(step.step, op_name(op), where, success)
    chances = dict(enumerate(map(to_float, event.op_probability[environment])))
    return Decision(
        step.step,
        op_name(op),
        " ".join([where, *_details(moment, event.actions[environment])]).strip(),
        success,
        chances.get(op),
        {legal: chances.get(legal) for legal in event.legal_ops[environment]},
        to_float(event.log_prob[environment]),
        to_float(event.value[environment]),
    )


def _details(moment: Moment, choices: Sequence[int]) -> list[str]:
    """The choices of the heads that the op uses, without op and slot."""
    actions = dict(zip(HEADS, choices, strict=True))
    relevant = RELEVANT_HEADS[Op(actions["op"])]
    words = [moment.blueprint_name(actions["blueprint"])] if "blueprint" in relevant else []
    return words + [
        f"{_BEFORE.get(head, '')}{options[actions[head]]}".lower()
        for head, options in CHOICES.items()
        if head in relevant
    ]


def in_one_line(decision: Decision, palette: Palette) -> Text:
    """Return the legal ops of a decision with their probabilities, in one line."""
    parts = [
        op_name(op) + ("" if chance is None else f" {100 * chance:.0f} %")
        for op, chance in decision.legal.items()
    ]
    legal = f"legal: {' · '.join(parts)}" if parts else "legal ops were not recorded"
    return Text(f"step {decision.step}  {legal}", style=palette.muted)


def in_full(decision: Decision, width: int, palette: Palette) -> Text:
    """Return every op of a decision with a bar for its probability, illegal ops included."""
    text = Text(f"step {decision.step}", style="bold")
    for label, value in (("log-prob", decision.log_prob), ("critic's value", decision.value)):
        if value is not None:
            text.append(f"  {label} {number_text(value)}", style=palette.muted)
    if not decision.legal:
        return text.append("  legal ops were not recorded", style=palette.muted)
    for op in Op:
        is_choice = op_name(op) == decision.op
        text.append(f"\n{'▶' if is_choice else ' '} {op_name(op):<10}", "bold" if is_choice else "")
        if op not in decision.legal:
            text.append("not legal", style=palette.muted)
            continue
        chance = decision.legal[op]
        if chance is None:
            text.append("legal")
            continue
        text.append(f"{100 * chance:5.1f} % ").append(gauge(chance, width), style=palette.twin)
    return text


_AXIS = TICK_WIDTH + 1


class Environment(View):
    """The page of one environment."""

    title = "environment"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,left_square_bracket", "other(-1)", "previous", key_display="←"),
        Binding("right,right_square_bracket", "other(1)", "next", key_display="→"),
        Binding("w", "waits", "waits"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.environment, self.waits = 0, False
        self.heading = Lines(id="environment-title")
        self.plot = Plot("validation accuracy", id="environment-accuracy")
        self.lanes, self.slots = Lines(id="environment-lanes"), Lines(id="environment-slots")
        self.table = RowsTable("decisions", "no decision other than wait yet")
        self.detail = Lines(id="decision")
        self.decisions: list[Decision] = []

    def compose(self) -> ComposeResult:
        yield self.heading
        with Horizontal():
            with Vertical(id="environment-life"):
                yield from (self.plot, self.lanes, self.slots)
            with Vertical(id="environment-decisions"):
                yield from (self.table, self.detail)

    def action_other(self, by: int) -> None:
        """Show the environment ``by`` numbers later; after the last comes the first."""
        if self._latest is None or self._latest[0].step is None:
            return
        self.environment = (self.environment + by) % len(self._latest[0].step.reward)
        self.show_again()

    def action_waits(self) -> None:
        """Show or hide wait decisions."""
        self.waits = not self.waits
        self.show_again()

    def draw(self, moment: Moment, palette: Palette) -> None:
        if moment.step is None:
            self.heading.show(
                Text("no environment steps; telemetry level normal writes them", palette.muted)
            )
            return
        self.environment = min(self.environment, len(moment.step.reward) - 1)
        steps = moment.episode(moment.round)
        self.heading.show(_title(moment, steps, self.environment, palette))
        self._show_accuracy(moment, steps, palette)
        self.slots.show(slot_table(moment, steps[-1], self.environment, palette))
        entries = decisions(moment, steps, self.environment)
        if not self.waits:
            entries = [decision for decision in entries if decision.op != op_name(Op.WAIT)]
        self.decisions = entries
        self.table.show(columns(palette), entries, palette.cursor)
        self._show_decision(palette)

    def _show_decision(self, palette: Palette) -> None:
        """Show the decision under the cursor, in full where there is room."""
        text = Text()
        if self.decisions:
            decision = self.decisions[min(self.table.cursor, len(self.decisions) - 1)]
            wide = self.app.screen.size.width >= WIDE
            full = in_full(decision, max(4, self.detail.size.width - 22), palette)
            text = full if wide else in_one_line(decision, palette)
        self.detail.show(text)

    def on_rows_table_cursor_move(self) -> None:
        """Show the decision under the cursor."""
        if self._latest is not None:
            self._show_decision(self._latest[1])

    def _show_accuracy(
        self, moment: Moment, steps: Sequence[EpochCompleted], palette: Palette
    ) -> None:
        assert moment.start is not None
        length, i = moment.start.episode_length, self.environment
        grown = [step.validation_accuracy[i] for step in steps]
        twin = [step.twin_validation_accuracy[i] for step in steps]
        low, high = _limits(to_floats(grown) + to_floats(twin))
        self.plot.show(
            [float(step.step) for step in steps],
            [
                Curve("never-grow twin", twin, palette.twin, "·"),
                Curve("grown", grown, palette.grown),
            ],
            (low, high, 1.0, float(max(2, length))),
        )
        lanes = lives(moment, steps, i, max(8, self.plot.size.width - _AXIS), palette)
        self.lanes.show(lanes)


def _limits(values: list[float]) -> tuple[float, float]:
    """Limits around the finite values, in multiples of 0.05."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = math.floor(20 * min(finite)) / 20, math.ceil(20 * max(finite)) / 20
    return low, high if high > low else low + 0.05


def _title(
    moment: Moment, steps: Sequence[EpochCompleted], environment: int, palette: Palette
) -> Text:
    assert moment.start is not None
    step = steps[-1]
    accuracy = float(step.validation_accuracy[environment])
    twin = float(step.twin_validation_accuracy[environment])
    outcome = moment.outcomes[-1] if moment.outcomes else None
    if outcome is not None and outcome.round == step.round:
        gain = outcome.gain[environment] if outcome.gain else None
        validation = outcome.validation_gain[environment]
        above = Text.assemble(
            "  gain ",
            difference_text(gain, "+.1f", palette),
            " (val. ",
            difference_text(validation, "+.1f", palette),
            ")",
        )
    else:
        above = Text("  lead ").append_text(difference_text(accuracy - twin, "+.3f", palette))
    episode_return = sum(to_floats([s.reward[environment] for s in steps]))
    return Text.assemble(
        (f"environment {environment}", "bold"),
        above,
        (f"  val. acc {number_text(accuracy)}", palette.grown),
        (f"  twin {number_text(twin)}", palette.twin),
        f"  return {number_text(episode_return, '+.3f')}",
        f"  added {count(step.added_parameters[environment])}",
        (f"  group {environment // moment.start.group_size}", palette.muted),
        (f"  {moment.task(environment) or ''}", palette.muted),
        no_wrap=True,
        overflow="ellipsis",
    )


def lives(
    moment: Moment, steps: Sequence[EpochCompleted], environment: int, width: int, palette: Palette
) -> Text:
    """Return the stage of every slot at every step, aligned with the plot's horizontal axis."""
    assert moment.start is not None
    length = max(2, moment.start.episode_length)
    stages = [step.stage[environment] for step in steps]
    names = moment.slot_names(environment, len(stages[-1]))
    # The plot maps steps to columns in the same way.
    steps_of_columns = [round(column * (length - 1) / max(1, width - 1)) for column in range(width)]
    text = Text(no_wrap=True)
    for slot, name in enumerate(names):
        if stages[-1][slot] == 0:
            continue
        text.append(f"{name[:TICK_WIDTH]:>{TICK_WIDTH}} ", style=palette.muted)
        for index in steps_of_columns:
            if index < len(stages):
                stage = stages[index][slot]
                text.append(GLYPHS.get(stage, "?"), style=palette.stage(stage))
        text.append("\n")
    text.rstrip()
    return text


def slot_table(moment: Moment, step: EpochCompleted, environment: int, palette: Palette) -> Text:
    """Return one line per slot: stage, blueprint, alpha and measured signals of its seed."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(
        f"{'slot':<7}{'stage':<14}{'blueprint':<13}{'alpha':<12}{'ablation':>9}{'grad':>9}"
        f"{'Shapley':>9}",
        style=palette.muted,
    )
    signals = moment.signals(step.round)
    signal = signals[-1] if signals else None
    counterfactuals = moment.counterfactuals(step.round)
    stages = step.stage[environment]
    for slot, name in enumerate(moment.slot_names(environment, len(stages))):
        stage = stages[slot]
        if stage == 0:
            continue
        has_seed = stage in LIVING
        kind = moment.blueprint_name(step.blueprint[environment][slot]) if has_seed else ""
        text.append(f"\n{name:<7}")
        text.append(f"{GLYPHS.get(stage, '?')} {stage_name(stage):<12}", palette.stage(stage))
        text.append(f"{kind:<13}")
        alpha = float(step.alpha[environment][slot])
        text.append(f"{gauge(alpha, 6)} {number_text(alpha, '.2f')} " if has_seed else " " * 12)
        if not has_seed:
            continue
        contribution = moment.contribution(step.round, environment, slot)
        gradient = signal.gradient_norm[environment][slot] if signal else None
        shapley = counterfactuals.shapley[environment][slot] if counterfactuals else None
        for value, form, stages_with_value in (
            (contribution, "+.3f", ACTING),
            (gradient, ".3g", COMPUTING),
            (shapley, "+.3f", ACTING),
        ):
            has_value = value is not None and stage in stages_with_value
            text.append(f"{number_text(value, form) if has_value else '-':>9}")
    return text
