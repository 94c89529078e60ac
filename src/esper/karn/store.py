"""Read the events of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from esper.leyline.events import Event
from esper.leyline.events.reader import EventReader

E = TypeVar("E", bound=Event)


def read_events(run: Path, kind: type[E]) -> Iterator[E]:
    """Yield the events of one kind, in order. Truncated or corrupt lines are skipped.

    Raises:
        UsageError: ``run`` has no events.
    """
    for _, event in EventReader(run, kind):
        if isinstance(event, kind):
            yield event
