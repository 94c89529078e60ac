"""Reads the events of a run: all of them, as they grow, or backwards from their end."""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from esper.leyline.errors import UsageError
from esper.leyline.events import EVENTS, Event, try_decode
from esper.leyline.events.parts import (
    DamagedPart,
    Part,
    lines_backwards,
    parts_of,
    read_lines,
    read_text,
)

CHUNK = 16 * 2**20
"""Bytes per read, limited so that the first events of a large file are available early."""

_TAG = b'{"event_type":"'
_MARK = 256
"""Bytes at the end of the last line that must be unchanged when the file has grown. They include
the time of the event, so a round that is repeated with the same results is recognised as new."""


class EventReader:
    """Reader of the events in a run directory, to which a process may still be writing.

    The log is the parts of a long run (``leyline.events.parts``) and then ``events.jsonl``. The
    latter is opened first: if its lines move to a part meanwhile, the open file keeps them, and
    the part is recognised by its first line.

    Args:
        run: the run directory; its event file need not exist yet.
        kinds: the kinds of events to yield, including subclasses; by default all kinds. Lines of
            other kinds are skipped by their first bytes, without a check that they are complete.
        check: whether to check those lines of ``events.jsonl`` as well; those of parts were checked
            when they moved there.

    Attributes:
        unreadable: number of lines skipped so far because they were truncated, corrupt or of a
            newer schema; a part that cannot be read counts as one.
        offset: bytes of the complete lines that ``new_lines`` has returned.
        size: bytes of the log at the last call of ``new_lines``.
        behind: whether ``new_lines`` may have more complete lines to return.
        resets: how often ``new_lines`` found the log truncated, as when a run is resumed.
    """

    def __init__(self, run: Path, *kinds: type[Event], check: bool = False):
        self.run, self.path = run, run / "events.jsonl"
        self.unreadable = 0
        self.offset, self.size, self.behind, self.resets = 0, 0, True, 0
        self._mark = b""
        self._kinds = [name for name, kind in EVENTS.items() if issubclass(kind, kinds)]
        self._check = check
        self._prefixes = tuple(_TAG + f'{name}"'.encode() for name in self._kinds)
        self._text: tuple[Part | None, bytes] = None, b""

    def __iter__(self) -> Iterator[tuple[bytes, Event]]:
        """The events of the wanted kinds in order, each with its line.

        Raises:
            UsageError: there is no event file, or it cannot be read.
        """
        if not self.path.is_file():
            raise UsageError(f"run: {self.run} holds no events.jsonl; name a run directory")
        try:
            with self.path.open("rb") as lines:
                for part in parts_of(self.run, lines):
                    yield from self._of_part(part)
                lines.seek(0)
                yield from self.events_in(lines)
        except OSError as error:
            raise UsageError(f"run: cannot read {self.path} ({error.strerror})") from error

    def _of_part(self, part: Part) -> Iterator[tuple[bytes, Event]]:
        try:
            lines = read_lines(part, self._kinds)
        except DamagedPart:
            self.unreadable += 1
            return
        yield from self.events_in(lines)

    def events_in(self, lines: Iterable[bytes]) -> Iterator[tuple[bytes, Event]]:
        """The events of the wanted kinds in some lines; the others are counted if unreadable."""
        for line in lines:
            skip = self._prefixes and line.startswith(_TAG) and not line.startswith(self._prefixes)
            if skip and not self._check:
                continue
            event = try_decode(line)
            if event is None:
                self.unreadable += 1
            elif not skip:
                yield line, event

    def new_lines(self, limit: int = CHUNK) -> list[bytes]:
        """The next complete lines within ``limit`` bytes; a line longer than that is also returned,
        and so is all of a part.

        A log that was truncated is read again from its beginning, even if it has since grown past
        its old length; ``resets`` counts this.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            parts = parts_of(self.run, file)
            base = parts[-1].end if parts else 0
            self.size = base + file.seek(0, os.SEEK_END)
            begin = self.offset - len(self._mark)
            if self._read(parts, file, begin, len(self._mark)) != self._mark:
                self.offset, self._mark, self.resets = 0, b"", self.resets + 1
            if self.offset < base:
                data, behind = self._read(parts, file, self.offset, base), True
            else:
                file.seek(self.offset - base)
                data = file.read(limit)
                # A line may be longer than the limit.
                while b"\n" not in data and len(data) == limit:
                    data += file.read(limit)
                    limit *= 2
                behind = len(data) == limit
        self.behind = behind
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        # No more than the last line, which lies in one file however lines are moved.
        last = complete[complete.rfind(b"\n", 0, -1) + 1 :]
        self._mark = last[-_MARK:] or self._mark
        return complete.split(b"\n")[:-1]

    def read_at(self, offset: int, length: int) -> bytes:
        """``length`` bytes of a line that ``new_lines`` returned, ``offset`` bytes into the log;
        fewer if the log was truncated since.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            return self._read(parts_of(self.run, file), file, offset, length)

    def _read(self, parts: list[Part], file: BinaryIO, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``offset`` in the log, of the one file that has them."""
        number = bisect_right(parts, offset, key=lambda part: part.end)
        if number == len(parts):
            file.seek(offset - (parts[-1].end if parts else 0))
            return file.read(length)
        part = parts[number]
        if self._text[0] != part:
            self._text = part, read_text(part)
        start = offset - part.start
        return self._text[1][start : start + length]

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
            parts = parts_of(self.run, file)
            position, tail = file.seek(0, os.SEEK_END), b""
            while position > 0:
                size = min(block, position)
                position = file.seek(position - size)
                first, *lines = (file.read(size) + tail).split(b"\n")
                yield from (line for line in reversed(lines) if line)
                tail = first
            if tail:
                yield tail
        yield from lines_backwards(parts)
