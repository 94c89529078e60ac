"""Remembering what was worked out of an event."""

from collections.abc import Callable
from typing import Generic, TypeVar

from esper.leyline.events import Event

E = TypeVar("E", bound=Event)
T = TypeVar("T")


class OfEach(Generic[E, T]):
    """A function of events that is called once for each of them.

    A run of ten thousand rounds is drawn ten times a second; what came of a round does not change.
    """

    def __init__(self, function: Callable[[E], T]):
        self.function = function
        # The event is kept beside its value, so that its id is not given to another.
        self._known: dict[int, tuple[E, T]] = {}

    def __call__(self, event: E) -> T:
        found = self._known.get(id(event))
        if found is None:
            found = self._known[id(event)] = event, self.function(event)
        return found[1]
