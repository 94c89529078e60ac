"""What a seed can be, by name: the registry of blueprints.

A blueprint is one function that maps the channels of a slot to parameters and forward (see
``Blueprint``), and one line of ``register``.
"""

from collections.abc import Callable, Collection
from functools import cache

from esper.kasmina.blueprints import conv, mlp, sequence
from esper.kasmina.blueprints.blueprint import Blueprint, Parameters
from esper.leyline.actions import BLUEPRINTS, EMPTY, add_blueprint
from esper.leyline.errors import UsageError

__all__ = ["BUILDERS", "FAMILIES", "Blueprint", "Parameters", "build", "of_family", "register"]

FAMILIES = ("conv", "mlp", "sequence")
"""Kinds of slots: behind a convolution, behind a linear map, and behind a transformer layer."""

Builder = Callable[[int], Blueprint]

BUILDERS: dict[str, dict[str, Builder]] = {}
"""By name of the blueprint, the families of slots it can live in and what builds it there."""


def register(name: str, builder: Builder, families: Collection[str] = ("conv",)) -> None:
    """Make a blueprint known; a name that is new becomes the last option of the blueprint head.

    Hosts, environments and policies take the list as it is when they are built, so register
    first, in the same order in every process that uses one checkpoint.

    Args:
        name: a Python identifier.
        builder: maps the channels of a slot to a ``Blueprint``.
        families: of the slots where it can live, out of ``FAMILIES``.

    Raises:
        UsageError: the name is taken or no identifier, or a family is unknown.
    """
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(f"blueprint: {name!r} is no name; use letters, digits and underscores")
    if name in BUILDERS or name == EMPTY:
        raise UsageError(f"blueprint: {name!r} is taken; choose another name")
    unknown = sorted(set(families) - set(FAMILIES))
    if unknown or not families:
        found = ", ".join(map(repr, unknown)) or "none"
        raise UsageError(f"families: got {found}; give a tuple out of {', '.join(FAMILIES)}")
    if name not in BLUEPRINTS:
        add_blueprint(name)
    BUILDERS[name] = dict.fromkeys(families, builder)


def of_family(family: str) -> tuple[int, ...]:
    """Indices, in the blueprint head, of the blueprints that can live in slots of ``family``."""
    return tuple(
        kind
        for kind, name in enumerate(BLUEPRINTS)
        if name in BUILDERS and family in BUILDERS[name]
    )


# Native twin: hosts/blueprints.h, make_branch.
def build(kind: int, channels: int, family: str) -> Blueprint:
    """The blueprint with index ``kind`` of the blueprint head, for a slot of ``channels``."""
    return _built(BUILDERS[BLUEPRINTS[kind]][family], channels)


@cache
def _built(builder: Builder, channels: int) -> Blueprint:
    return builder(channels)


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
# What looks at other pixels must not look ahead in a sequence, so these have another form there.
BUILDERS["norm"]["sequence"] = sequence.norm
BUILDERS["attention"]["sequence"] = sequence.attention
