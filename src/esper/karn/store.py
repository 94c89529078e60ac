"""Reading the events of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from esper.leyline.errors import UsageError
from esper.leyline.events import Event, decode

E = TypeVar("E", bound=Event)


class EventFile:
    """The events of a run, in order, each with its line.

    Attributes:
        unreadable: lines passed over so far, because they were cut off, corrupt or of a newer
            schema.

    Raises:
        UsageError: ``run`` holds no events, or they cannot be read.
    """

    def __init__(self, run: Path):
        self.path = run / "events.jsonl"
        self.unreadable = 0
        if not self.path.is_file():
            raise UsageError(f"run: {run} holds no events.jsonl; name a run directory")

    def __iter__(self) -> Iterator[tuple[bytes, Event]]:
        try:
            with self.path.open("rb") as lines:
                for line in lines:
                    try:
                        event = decode(line.decode())
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        self.unreadable += 1
                        continue
                    yield line, event
        except OSError as error:
            raise UsageError(f"run: cannot read {self.path} ({error.strerror})") from error


def read_events(run: Path, kind: type[E]) -> Iterator[E]:
    """Events of one kind, in order. A line that is cut off or corrupt is passed over.

    Raises:
        UsageError: ``run`` holds no events.
    """
    for _, event in EventFile(run):
        if isinstance(event, kind):
            yield event
