"""Reading an event file: whole, as it grows, or from its end."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from esper.leyline.errors import UsageError
from esper.leyline.events import EVENTS, Event, decode

CHUNK = 16 * 2**20
"""Bytes taken in at a time, so that a large file shows its first part early."""

_TAG = b'{"event_type":"'
_MARK = 256
"""Bytes at the end of the last line that must still be there when the file has grown; the time is
among them, so that a round that is run again with the same bits is not taken for the first."""


def try_decode(line: bytes) -> Event | None:
    """The event of a line; None where it is cut off, corrupt or of a newer schema."""
    try:
        event: Event = decode(line.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event


class EventReader:
    """``events.jsonl`` of a run directory, which a process may be writing to.

    Args:
        run: the run directory; the file need not exist yet.
        kinds: kinds of events that are wanted, their subclasses included; all when not given.
            Others are passed over by the beginning of their line, whether they are whole or not.

    Attributes:
        unreadable: lines passed over so far, because they were cut off, corrupt or of a newer
            schema.
        offset: bytes of the complete lines that ``appended`` gave.
        size: bytes of the file when ``appended`` last looked at it.
        behind: whether there may be complete lines left for ``appended``.
        resets: how often ``appended`` found the file cut, as it is when a run is resumed.
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
        """The events that are wanted, in order, each with its line.

        Raises:
            UsageError: there are no events, or they cannot be read.
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
        """Complete lines that were not given before, of ``limit`` bytes, but one line at least.

        A file that was cut, even if it has grown past its old length since, is read anew from its
        beginning; ``resets`` counts that.

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
        """All events from the last to the first, ``block`` bytes in memory at a time.

        What cannot be read is passed over; without a file there are none.
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
