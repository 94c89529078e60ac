"""Kasmina holds the hosts and the seeds that grow in them.

It defines flat parameter stores with a leading environment axis, the blueprints of seeds, the slots
in which seeds live, and the lifecycle of seeds as tensor functions. It does no training.
"""

from typing import TYPE_CHECKING, Any

from esper.kasmina.slots import Slot

if TYPE_CHECKING:
    from esper.kasmina.hosts.module import ModuleHost

__all__ = ["ModuleHost", "Slot"]


def __getattr__(name: str) -> Any:
    """``ModuleHost``, imported when it is used: growing a module of one's own needs no hosts."""
    if name != "ModuleHost":
        raise AttributeError(f"module 'esper.kasmina' has no attribute {name!r}")
    from esper.kasmina.hosts.module import ModuleHost

    return ModuleHost
