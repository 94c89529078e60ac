"""Kasmina keeps the hosts and the seeds that grow in them.

Flat parameter stores with a leading environment axis, the blueprints a seed can be, the slots it
can live in, and its lifecycle as tensor functions. It trains nothing.
"""

from esper.kasmina.hosts.module import ModuleHost, Slot

__all__ = ["ModuleHost", "Slot"]
