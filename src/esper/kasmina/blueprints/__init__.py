"""The registry of blueprints, the kinds of seeds, by name.

To add a blueprint, write a function that maps the number of channels of a slot to a ``Blueprint``
(parameters and forward pass), and pass it to ``register``.
"""

from collections.abc import Callable, Collection
from functools import cache

from esper.kasmina.blueprints import conv, mlp, sequence
from esper.kasmina.blueprints.blueprint import (
    FORM_OF_STYLE,
    Blueprint,
    Form,
    LastLayer,
    Parameters,
    branch,
    gate_fields,
)
from esper.kasmina.blueprints.spans import ADDED_UNITS, Span, span_blueprint, towards_next
from esper.leyline.actions import BLUEPRINTS, EMPTY, add_blueprint
from esper.leyline.errors import UsageError

__all__ = [
    "ADDED_UNITS",
    "BUILDERS",
    "FAMILIES",
    "FORM_OF_STYLE",
    "SHIPPED_BLUEPRINTS",
    "Blueprint",
    "Form",
    "LastLayer",
    "Parameters",
    "Span",
    "branch",
    "build",
    "gate_fields",
    "of_family",
    "register",
    "towards_next",
]

FAMILIES = ("conv", "mlp", "sequence")
"""Families of slots: after a convolution, after a linear map, and after a transformer layer."""

Builder = Callable[[int], Blueprint]
"""Builds a blueprint for the number of channels of a slot."""

BUILDERS: dict[str, dict[str, Builder]] = {}
"""The builder of each blueprint, by its name and the family of slots."""


def register(name: str, builder: Builder, families: Collection[str] = ("conv",)) -> None:
    """Register a blueprint; a new name becomes the last option of the blueprint head.

    Hosts, environments and policies read the registry when they are built. Register before that,
    and in the same order in every process that uses a checkpoint.

    Args:
        name: name of the blueprint, a Python identifier.
        builder: maps the number of channels of a slot to a ``Blueprint``.
        families: families of slots in which it can live, out of ``FAMILIES``.

    Raises:
        UsageError: the name is taken or not an identifier, or a family is unknown.
    """
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(
            f"blueprint: {name!r} is not an identifier; use letters, digits and underscores"
        )
    if name in BUILDERS or name == EMPTY:
        raise UsageError(f"blueprint: {name!r} is taken; choose another name")
    unknown = sorted(set(families) - set(FAMILIES))
    if unknown or not families:
        names = ", ".join(map(repr, unknown)) or "none"
        raise UsageError(f"families: got {names}; give one or more of {', '.join(FAMILIES)}")
    if name not in BLUEPRINTS:
        add_blueprint(name)
    BUILDERS[name] = dict.fromkeys(families, builder)


def of_family(family: str) -> tuple[int, ...]:
    """Indices in the blueprint head of the blueprints for slots of ``family``."""
    return tuple(
        kind
        for kind, name in enumerate(BLUEPRINTS)
        if name in BUILDERS and family in BUILDERS[name]
    )


# Native twin: hosts/blueprints.h, make_branch.
def build(kind: int, channels: int, family: str, span: Span | None = None) -> Blueprint:
    """The blueprint with index ``kind`` in the blueprint head, for a slot of ``channels``.

    In a slot that spans a layer, ``span``, it is that of units for this layer.
    """
    name = BLUEPRINTS[kind]
    if span is not None:
        return _span_blueprint(name, span, family, channels)
    return _blueprint(BUILDERS[name][family], channels)


@cache
def _blueprint(builder: Builder, channels: int) -> Blueprint:
    return builder(channels)


_span_blueprint = cache(span_blueprint)


register("conv_light", conv.conv_light)
register("attention", conv.attention)
register("norm", conv.norm)
register("depthwise", conv.depthwise)
register("bottleneck", conv.bottleneck)
register("conv_small", conv.conv_small)
register("conv_heavy", conv.conv_heavy)
register("mlp_small", mlp.mlp_small, families=("mlp", "sequence"))
register("mlp", mlp.mlp, families=("mlp", "sequence"))
register("lora", sequence.lora, families=("sequence",))
register("lora_large", sequence.lora_large, families=("sequence",))
# In a sequence no position may see later ones, so blueprints that mix pixels differ there.
BUILDERS["norm"]["sequence"] = sequence.sequence_norm
BUILDERS["attention"]["sequence"] = sequence.sequence_attention

SHIPPED_BLUEPRINTS = tuple(BUILDERS)
"""Names of the blueprints that come with Esper; others are of the user's own."""
