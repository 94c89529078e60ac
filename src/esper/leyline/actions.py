"""The action: eight heads, and which of them matter for which operation."""

from enum import IntEnum
from typing import Final


class Op(IntEnum):
    """What to do in this step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILISE = 4
    ADVANCE = 5


class Style(IntEnum):
    """How a seed is blended in: the curve of its alpha and the form of its residual branch."""

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
"""The blueprint option that marks an empty slot and is never legal."""

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
"""Names of the blueprint head's options, by index. It grows by ``kasmina.blueprints.register``."""

TEMPO_STEPS: Final = (3, 5, 8)
"""Length of the first blend in environment steps, by index of the tempo head."""

ALPHA_TARGETS: Final = (0.5, 0.7, 1.0)
"""Alpha at which a blend stops, by index of the alpha_target head."""

ALPHA_SPEED_STEPS: Final = (0, 3, 5, 8)
"""Length of a retargeting or pruning ramp in environment steps, by index; 0 jumps."""

CURVE_STEEPNESS: Final = (0.0, 0.0, 6.0, 12.0, 24.0)
"""Steepness of each ``Curve``; 0 where the curve is no sigmoid."""

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
"""The heads in the order of the action tensor's last axis."""

CHOICE_HEADS: Final = HEADS[2:]
"""The heads drawn last, given the op and the chosen slot."""

CHOICES: Final[dict[str, tuple[str, ...] | tuple[float, ...]]] = {
    "style": tuple(style.name for style in Style),
    "tempo": TEMPO_STEPS,
    "alpha_target": ALPHA_TARGETS,
    "alpha_speed": ALPHA_SPEED_STEPS,
    "alpha_curve": tuple(curve.name for curve in Curve),
}
"""What the options of a head stand for, by index. Blueprints are in ``BLUEPRINTS``."""

HEAD_WIDTHS: Final[dict[str, int]] = {
    "op": len(Op),
    "blueprint": len(BLUEPRINTS),
    **{head: len(options) for head, options in CHOICES.items()},
}
"""Number of options of each head; the slot head has as many as the host has slots."""


def add_blueprint(name: str) -> None:
    """Append an option to the blueprint head; see ``kasmina.blueprints.register``."""
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
"""The causal table: heads that change anything when the op is chosen."""

CANONICAL_CHOICE: Final[dict[str, int]] = {
    "slot": 0,
    "blueprint": 0,
    "style": int(Style.SIGMOID_ADD),
    "tempo": 1,
    "alpha_target": 2,
    "alpha_speed": 0,
    "alpha_curve": int(Curve.LINEAR),
}
"""The value recorded for a head that does not matter for the chosen op."""
