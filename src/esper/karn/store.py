"""Reading the events of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from esper.leyline.events import Event
from esper.leyline.events.reader import EventReader

E = TypeVar("E", bound=Event)


def read_events(run: Path, kind: type[E]) -> Iterator[E]:
    """Events of one kind, in order. A line that is cut off or corrupt is passed over.

    Raises:
        UsageError: ``run`` holds no events.
    """
    for _, event in EventReader(run, kind):
        if isinstance(event, kind):
            yield event
