"""Kasmina holds the hosts and the seeds that grow in them.

It defines flat parameter stores with a leading environment axis, the blueprints of seeds, the slots
in which seeds live, and the lifecycle of seeds as tensor functions. It does no training.
"""

from esper.kasmina.hosts.module import ModuleHost, Slot

__all__ = ["ModuleHost", "Slot"]
