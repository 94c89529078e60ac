"""The policy's decisions for one environment, newest first."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from esper.karn.sanctum.formatting import gauge, to_float, written
from esper.karn.sanctum.palette import Palette, op_name
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.table import Column
from esper.leyline.actions import CHOICES, HEADS, RELEVANT_HEADS, Op
from esper.leyline.events import DecisionsMade, EpochCompleted

_BEFORE = {"tempo": "in ", "alpha_target": "to ", "alpha_speed": "within "}
"""Words before the options of these heads."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision.

    Attributes:
        step: step of the episode, from 1.
        op: name of the operation.
        choice: slot, and the choices of the other heads that the op uses.
        probability: probability of the op; None where it was not recorded.
        success: whether the op was legal and therefore took effect.
        legal: probability of every legal op, None where the policy has no probabilities; empty
            before schema 3.
        log_prob: log-probability of the whole action; None where it was not recorded.
        value: the critic's value estimate, in units of the normalised return; None where it was
            not recorded.
    """

    step: int
    op: str
    choice: str
    probability: float | None
    success: bool
    legal: dict[int, float | None]
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
    made = {event.step: event for event in moment.decisions(steps[-1].round)}
    return [_decision(moment, s, made.get(s.step), environment, names) for s in reversed(steps)]


def _decision(
    moment: Moment,
    step: EpochCompleted,
    made: DecisionsMade | None,
    environment: int,
    names: Sequence[str],
) -> Decision:
    op, slot = step.op[environment], step.slot[environment]
    where = "" if op == Op.WAIT else (names[slot] if slot < len(names) else f"slot {slot}")
    chances = _chances(made, environment)
    return Decision(
        step.step,
        op_name(op),
        " ".join([where, *_details(moment, made, environment)]).strip(),
        chances.get(op),
        step.success[environment],
        {} if made is None else {o: chances.get(o) for o in made.legal_ops[environment]},
        None if made is None else to_float(made.log_prob[environment]),
        None if made is None else to_float(made.value[environment]),
    )


def _chances(made: DecisionsMade | None, environment: int) -> dict[int, float | None]:
    if made is None:
        return {}
    return {op: to_float(p) for op, p in enumerate(made.op_probability[environment])}


def _details(moment: Moment, made: DecisionsMade | None, environment: int) -> list[str]:
    """The choices of the heads that the op uses, without op and slot."""
    if made is None:
        return []
    chosen = dict(zip(HEADS, made.actions[environment], strict=True))
    relevant = RELEVANT_HEADS[Op(chosen["op"])]
    words = [moment.blueprint_name(chosen["blueprint"])] if "blueprint" in relevant else []
    return words + [
        f"{_BEFORE.get(head, '')}{options[chosen[head]]}".lower()
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
            text.append(f"  {label} {written(value)}", style=palette.muted)
    if not decision.legal:
        return text.append("  legal ops were not recorded", style=palette.muted)
    for op in Op:
        chosen = op_name(op) == decision.op
        text.append(f"\n{'▶' if chosen else ' '} {op_name(op):<10}", "bold" if chosen else "")
        if op not in decision.legal:
            text.append("not legal", style=palette.muted)
            continue
        chance = decision.legal[op]
        if chance is None:
            text.append("legal")
            continue
        text.append(f"{100 * chance:5.1f} % ").append(gauge(chance, width), style=palette.twin)
    return text
