"""A cache of values computed from events."""

from collections.abc import Callable
from typing import Generic, TypeVar

from esper.leyline.events import Event

E = TypeVar("E", bound=Event)
T = TypeVar("T")


class PerEventCache(Generic[E, T]):
    """Wraps a function of an event so that it is called once per event.

    Sanctum redraws up to ten times per second, and a run may have ten thousand rounds whose
    outcomes no longer change.
    """

    def __init__(self, function: Callable[[E], T]):
        self.function = function
        # Keeping a reference to the event prevents another object from reusing its id.
        self._known: dict[int, tuple[E, T]] = {}

    def __call__(self, event: E) -> T:
        found = self._known.get(id(event))
        if found is None:
            found = self._known[id(event)] = event, self.function(event)
        return found[1]
