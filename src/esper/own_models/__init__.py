"""Growing a module of the user's own; its public names are those of ``__all__``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.kasmina.slots import Slot
    from esper.own_models.attachment import strip
    from esper.own_models.controller import Growth
    from esper.own_models.growing import grow
    from esper.own_models.growth_result import EpochRecord, GrowthResult
    from esper.own_models.model_check import check
    from esper.own_models.objectives import Validation
    from esper.own_models.saving import load_grown

HOMES = {
    "EpochRecord": "esper.own_models.growth_result",
    "Growth": "esper.own_models.controller",
    "GrowthResult": "esper.own_models.growth_result",
    "Slot": "esper.kasmina.slots",
    "Validation": "esper.own_models.objectives",
    "check": "esper.own_models.model_check",
    "grow": "esper.own_models.growing",
    "load_grown": "esper.own_models.saving",
    "strip": "esper.own_models.attachment",
}
"""Where each public name lives. It is imported when it is first used: torch takes seconds."""

__all__ = [
    "EpochRecord",
    "Growth",
    "GrowthResult",
    "Slot",
    "Validation",
    "check",
    "grow",
    "load_grown",
    "strip",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'esper.own_models' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
