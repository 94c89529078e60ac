"""Growing a module of the user's own; its public names are those of ``HOMES``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.kasmina.slots import Slot as Slot
    from esper.own_models.attachment import strip as strip
    from esper.own_models.controller import Growth as Growth
    from esper.own_models.growing import grow as grow
    from esper.own_models.growth_result import EpochRecord as EpochRecord
    from esper.own_models.growth_result import GrowthResult as GrowthResult
    from esper.own_models.loading import load_grown as load_grown
    from esper.own_models.model_check import check as check
    from esper.own_models.objectives import Validation as Validation
    from esper.own_models.wider_model import Enlargement as Enlargement
    from esper.own_models.wider_model import deepen as deepen
    from esper.own_models.wider_model import widen as widen

HOMES = {
    "Enlargement": "own_models.wider_model",
    "EpochRecord": "own_models.growth_result",
    "Growth": "own_models.controller",
    "GrowthResult": "own_models.growth_result",
    "Slot": "kasmina.slots",
    "Validation": "own_models.objectives",
    "check": "own_models.model_check",
    "deepen": "own_models.wider_model",
    "grow": "own_models.growing",
    "load_grown": "own_models.loading",
    "strip": "own_models.attachment",
    "widen": "own_models.wider_model",
}
"""Where each public name lives. It is imported when it is first used: torch takes seconds."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'esper.own_models' has no attribute {name!r}")
    return getattr(import_module(f"esper.{HOMES[name]}"), name)
