"""Reads an event file: all of it, as it grows, or backwards from its end."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_origin

import msgspec

from esper.leyline.errors import UsageError
from esper.leyline.events import EVENTS, Event, TrainingStarted, decode

CHUNK = 16 * 2**20
"""Bytes per read, limited so that the first events of a large file are available early."""

_TAG = b'{"event_type":"'
_MARK = 256
"""Bytes at the end of the last line that must be unchanged when the file has grown. They include
the time of the event, so a round that is repeated with the same results is recognised as new."""


def try_decode(line: bytes) -> Event | None:
    """The event of a line; None if the line is truncated, corrupt or of a newer schema."""
    try:
        event: Event = decode(line.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if _lists_agree(event) else None


def _lists_agree(event: Event) -> bool:
    """Whether the lists of an event have one entry for each of the same things.

    A list with a default may be empty, as in events of an older schema, and so may those of a run
    that has no hosts.
    """
    needed, optional = _lists_of(type(event))
    lengths = {len(getattr(event, name)) for name in needed}
    lengths |= {len(found) for name in optional if (found := getattr(event, name))}
    return len(lengths) <= 1


@cache
def _lists_of(kind: type[Event]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parallel lists of a kind of event: those that are full, and those that may be empty."""
    names: tuple[list[str], list[str]] = [], []
    for field in msgspec.structs.fields(kind):
        # The blueprints of a run are listed beside its tasks.
        if get_origin(field.type) is list and field.name != "blueprints":
            names[kind is TrainingStarted or not field.required].append(field.name)
    return tuple(names[0]), tuple(names[1])


class EventReader:
    """Reader of ``events.jsonl`` in a run directory, to which a process may still be writing.

    Args:
        run: the run directory; the file need not exist yet.
        kinds: the kinds of events to yield, including subclasses; by default all kinds. Lines of
            other kinds are skipped by their first bytes, without a check that they are complete.

    Attributes:
        unreadable: number of lines skipped so far because they were truncated, corrupt or of a
            newer schema.
        offset: bytes of the complete lines that ``appended`` has returned.
        size: bytes of the file at the last call of ``appended``.
        behind: whether ``appended`` may have more complete lines to return.
        resets: how often ``appended`` found the file truncated, as when a run is resumed.
    """

    def __init__(self, run: Path, *kinds: type[Event]):
        self.path = run / "events.jsonl"
        self.unreadable = 0
        self.offset, self.size, self.behind, self.resets = 0, 0, True, 0
        self._mark = b""
        self._wanted = tuple(
            _TAG + f'{name}"'.encode() for name, kind in EVENTS.items() if issubclass(kind, kinds)
        )

    def __iter__(self) -> Iterator[tuple[bytes, Event]]:
        """The events of the wanted kinds in order, each with its line.

        Raises:
            UsageError: there is no event file, or it cannot be read.
        """
        if not self.path.is_file():
            run = self.path.parent
            raise UsageError(f"run: {run} holds no events.jsonl; name a run directory")
        try:
            with self.path.open("rb") as lines:
                for line in lines:
                    if self._wanted and line.startswith(_TAG) and not line.startswith(self._wanted):
                        continue
                    event = try_decode(line)
                    if event is not None:
                        yield line, event
                    else:
                        self.unreadable += 1
        except OSError as error:
            raise UsageError(f"run: cannot read {self.path} ({error.strerror})") from error

    def appended(self, limit: int = CHUNK) -> list[bytes]:
        """The next complete lines within ``limit`` bytes; a line longer than that is also returned.

        A file that was truncated is read again from its beginning, even if it has since grown past
        its old length; ``resets`` counts this.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            self.size = file.seek(0, os.SEEK_END)
            file.seek(self.offset - len(self._mark))
            if file.read(len(self._mark)) != self._mark:
                self.offset, self._mark, self.resets = 0, b"", self.resets + 1
            file.seek(self.offset)
            data = file.read(limit)
            # A line may be longer than the limit.
            while b"\n" not in data and len(data) == limit:
                data += file.read(limit)
                limit *= 2
        self.behind = len(data) == limit
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        self._mark = whole[-_MARK:] or self._mark
        return whole.split(b"\n")[:-1]

    def backwards(self, block: int = 2**20) -> Iterator[Event]:
        """All events from the last to the first, reading ``block`` bytes at a time.

        Unreadable lines are skipped; a file that does not exist has no events.
        """
        return filter(None, map(try_decode, self._lines_backwards(block)))

    def _lines_backwards(self, block: int) -> Iterator[bytes]:
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            place, rest = file.seek(0, os.SEEK_END), b""
            while place > 0:
                size = min(block, place)
                place = file.seek(place - size)
                first, *whole = (file.read(size) + rest).split(b"\n")
                yield from (line for line in reversed(whole) if line)
                rest = first
            if rest:
                yield rest
