"""The action: eight heads, and which of them each operation uses."""

from enum import IntEnum
from typing import Final


class Op(IntEnum):
    """The operation that an environment performs in one step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILISE = 4
    ADVANCE = 5


class Style(IntEnum):
    """How a seed is blended into the host: its alpha curve and how its branch is combined."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


class Curve(IntEnum):
    """Shape of an alpha ramp. The sigmoids differ in steepness."""

    LINEAR = 0
    COSINE = 1
    SIGMOID_GENTLE = 2
    SIGMOID = 3
    SIGMOID_SHARP = 4


EMPTY: Final = "noop"
"""The blueprint option that stands for an empty slot; choosing it is never legal."""

BLUEPRINTS: Final[list[str]] = [
    EMPTY,
    "conv_light",
    "attention",
    "norm",
    "depthwise",
    "bottleneck",
    "conv_small",
    "conv_heavy",
    "lora",
    "lora_large",
    "mlp_small",
    "mlp",
    "flex_attention",
]
"""Options of the blueprint head, by index; ``kasmina.blueprints.register`` appends to them. An
option without a builder (flex_attention) is never legal."""

TEMPO_STEPS: Final = (3, 5, 8)
"""Length of the first blend in environment steps, by index of the tempo head."""

ALPHA_TARGETS: Final = (0.5, 0.7, 1.0)
"""Final alpha of a blend, by index of the alpha_target head."""

ALPHA_SPEED_STEPS: Final = (0, 3, 5, 8)
"""Length of a retargeting or pruning ramp in environment steps, by index of the alpha_speed head;
0 changes alpha at once."""

CURVE_STEEPNESS: Final = (0.0, 0.0, 6.0, 12.0, 24.0)
"""Steepness of each ``Curve``; 0 for curves that are not sigmoids."""

HEADS: Final = (
    "op",
    "slot",
    "blueprint",
    "style",
    "tempo",
    "alpha_target",
    "alpha_speed",
    "alpha_curve",
)
"""The heads, in the order of the last axis of the action tensor."""

CHOICE_HEADS: Final = HEADS[2:]
"""The heads that are sampled last, given the operation and the slot."""

CHOICES: Final[dict[str, tuple[str, ...] | tuple[float, ...]]] = {
    "style": tuple(style.name for style in Style),
    "tempo": TEMPO_STEPS,
    "alpha_target": ALPHA_TARGETS,
    "alpha_speed": ALPHA_SPEED_STEPS,
    "alpha_curve": tuple(curve.name for curve in Curve),
}
"""Values of the options of a head, by index. Those of the blueprint head are ``BLUEPRINTS``."""

HEAD_WIDTHS: Final[dict[str, int]] = {
    "op": len(Op),
    "blueprint": len(BLUEPRINTS),
    **{head: len(options) for head, options in CHOICES.items()},
}
"""Number of options of each head; the slot head has one per slot of the host."""


def add_blueprint(name: str) -> None:
    """Append ``name`` to the options of the blueprint head; see ``kasmina.blueprints.register``."""
    BLUEPRINTS.append(name)
    HEAD_WIDTHS["blueprint"] = len(BLUEPRINTS)


RELEVANT_HEADS: Final[dict[Op, frozenset[str]]] = {
    Op.WAIT: frozenset({"op"}),
    Op.GERMINATE: frozenset({"op", "slot", "blueprint", "style", "tempo", "alpha_target"}),
    Op.SET_ALPHA_TARGET: frozenset({"op", "slot", "alpha_target", "alpha_speed", "alpha_curve"}),
    Op.PRUNE: frozenset({"op", "slot", "alpha_speed", "alpha_curve"}),
    Op.FOSSILISE: frozenset({"op", "slot"}),
    Op.ADVANCE: frozenset({"op", "slot"}),
}
"""The causal table: the heads that affect the outcome of each operation."""

CANONICAL_CHOICE: Final[dict[str, int]] = {
    "slot": 0,
    "blueprint": 0,
    "style": int(Style.SIGMOID_ADD),
    "tempo": 1,
    "alpha_target": 2,
    "alpha_speed": 0,
    "alpha_curve": int(Curve.LINEAR),
}
"""The value recorded for a head that the chosen operation does not use."""
