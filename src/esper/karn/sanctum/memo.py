"""A cache of values computed from events."""

from collections.abc import Callable
from typing import Generic, TypeVar

from esper.leyline.events import Event

E = TypeVar("E", bound=Event)
T = TypeVar("T")


class OfEach(Generic[E, T]):
    """Wraps a function of an event so that it is called once per event.

    A run of ten thousand rounds is drawn ten times per second; outcomes of past rounds do not
    change.
    """

    def __init__(self, function: Callable[[E], T]):
        self.function = function
        # The event is kept with its value, so that no other object can get its id.
        self._known: dict[int, tuple[E, T]] = {}

    def __call__(self, event: E) -> T:
        found = self._known.get(id(event))
        if found is None:
            found = self._known[id(event)] = event, self.function(event)
        return found[1]
