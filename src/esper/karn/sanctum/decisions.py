"""What was decided for one environment, step by step, newest first."""

from collections.abc import Sequence
from dataclasses import dataclass

from esper.karn.sanctum.moment import Moment, blueprint_name
from esper.karn.sanctum.palette import op_name
from esper.karn.sanctum.table import Column
from esper.leyline.actions import Op
from esper.leyline.events import EpochCompleted

COLUMNS = (
    Column("step", 4, right=True),
    Column("decision", 10),
    Column("what, where", 20),
    Column("chance", 6, right=True),
    Column("effect", 11),
    Column("could have", 40),
)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision.

    Attributes:
        step: from 1.
        op: in words.
        choice: what it was about.
        probability: of op, slot and all else that mattered together; None where it is not told.
        success: whether it took effect.
        options: what else was legal, with its probability; ``""`` where that is not told.
    """

    step: int
    op: str
    choice: str
    probability: float | None
    success: bool
    options: str


def decisions(moment: Moment, steps: Sequence[EpochCompleted], environment: int) -> list[Decision]:
    """The decisions of an episode so far, newest first."""
    names = moment.slot_names(environment, len(steps[-1].stage[environment]))
    return [_decision(step, environment, names) for step in reversed(steps)]


def _decision(step: EpochCompleted, environment: int, names: Sequence[str]) -> Decision:
    op, slot = step.op[environment], step.slot[environment]
    choice = ""
    if op != Op.WAIT:
        choice = names[slot] if slot < len(names) else f"slot {slot}"
    if op == Op.GERMINATE and step.success[environment]:
        choice = f"{blueprint_name(step.blueprint[environment][slot])} in {choice}"
    return Decision(step.step, op_name(op), choice, None, step.success[environment], "")
