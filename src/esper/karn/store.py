"""Reading the events of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from esper.leyline.errors import UsageError
from esper.leyline.events import Event, decode

E = TypeVar("E", bound=Event)


def read_events(run: Path, kind: type[E]) -> Iterator[E]:
    """Events of one kind, in order. A line that is cut off or corrupt is passed over.

    Raises:
        UsageError: ``run`` holds no events.
    """
    path = run / "events.jsonl"
    if not path.is_file():
        raise UsageError(f"run: {run} holds no events.jsonl; name a run directory")
    with path.open("rb") as lines:
        for line in lines:
            try:
                event = decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(event, kind):
                yield event
