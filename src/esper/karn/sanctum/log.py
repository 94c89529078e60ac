"""The events of a run, read as they grow.

Events of rounds are kept decoded. Of the large events of steps, which hold one value per
environment, only the position in the log is kept, and a view reads them again when it needs them:
the lines of a million environment steps are about 200 MiB.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, Union

import msgspec

from esper.leyline.events import (
    EVENTS,
    DecisionsMade,
    EpochCompleted,
    Event,
    PPOUpdateCompleted,
    SeedContributions,
    SeedSignalsMeasured,
    StepEvent,
    event_type,
    try_decode,
)
from esper.leyline.events.reader import CHUNK, EventReader

E = TypeVar("E", bound=Event)

LARGE_KINDS: tuple[type[StepEvent], ...] = (
    *(EpochCompleted, DecisionsMade),
    *(SeedContributions, SeedSignalsMeasured),
)
"""Kinds of events of which only the position is kept; they are read again on demand."""

CACHE_SIZE = 2048
"""Maximum number of decoded step events in the cache."""

# Skipping the values of all environments halves the time to open a large file.
_OUTLINES = {
    msgspec.defstruct(
        kind.__name__, (), bases=(StepEvent,), kw_only=True, tag=event_type(kind)
    ): kind
    for kind in LARGE_KINDS
}
_outline = msgspec.json.Decoder(
    Union[tuple(kind for kind in EVENTS.values() if kind not in LARGE_KINDS) + tuple(_OUTLINES)]  # noqa: UP007
)


@dataclass(slots=True)
class EventList:
    """The events of one kind, with the numbers of their lines."""

    lines: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Location:
    """Where the event of a step is in the log; offset and length are in bytes."""

    line: int
    offset: int
    length: int
    round: int
    step: int


@dataclass(slots=True)
class Index:
    """The index of the events of a run. It only grows: a log that was truncated gets a new one.

    Attributes:
        lines: number of complete lines read.
        corrupt: number of those that are not JSON.
        unknown: number of those whose kind or fields this version does not know.
        length: total length of the complete lines, bytes.
    """

    lines: int = 0
    corrupt: int = 0
    unknown: int = 0
    length: int = 0
    lists: dict[type[Event], EventList] = field(default_factory=dict)
    locations: dict[type[Event], list[Location]] = field(
        default_factory=lambda: {kind: [] for kind in LARGE_KINDS}
    )

    def add(self, line: bytes) -> None:
        """Add one line, given without its newline."""
        offset, self.length, self.lines = self.length, self.length + len(line) + 1, self.lines + 1
        try:
            event = _outline.decode(line)
        except msgspec.ValidationError:
            self.unknown += 1
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.corrupt += 1
            return
        # The updates of all algorithms are one sequence.
        kind = PPOUpdateCompleted if isinstance(event, PPOUpdateCompleted) else type(event)
        if kind in _OUTLINES:
            location = Location(self.lines, offset, len(line), event.round, event.step)
            self.locations[_OUTLINES[kind]].append(location)
        else:
            series = self.lists.setdefault(kind, EventList())
            # `until` may run on another thread and searches `lines`, so the event is added first.
            series.events.append(event)
            series.lines.append(self.lines)

    def until(self, kind: type[E], line: int | None = None) -> Sequence[E]:
        """Return the events of a kind in order, up to line ``line`` or all."""
        series = self.lists.get(kind, EventList())
        return series.events[: _end(series, line)]  # type: ignore[return-value]

    def last(self, kind: type[E], line: int | None = None) -> tuple[int, E | None]:
        """Return the last event of a kind up to line ``line``, and its line; 0 and None without."""
        series = self.lists.get(kind, EventList())
        end = _end(series, line)
        return (series.lines[end - 1], series.events[end - 1]) if end else (0, None)  # type: ignore[return-value]


def _end(series: EventList, line: int | None) -> int:
    return len(series.lines) if line is None else bisect_right(series.lines, line)


class EventLog(EventReader):
    """Follows the events of a run directory while they are written.

    Args:
        run: the run directory; the file need not exist yet.
    """

    def __init__(self, run: Path):
        super().__init__(run)
        self.index = Index()
        # The number of resets is part of the key, because a log may be truncated and grow again.
        self._decode = lru_cache(CACHE_SIZE)(
            lambda resets, offset, length: try_decode(self.read_at(offset, length))
        )

    @property
    def cut_off(self) -> int:
        """Bytes after the last complete line, of a line that is partly written."""
        return max(0, self.size - self.index.length)

    def last_change(self) -> float | None:
        """Return when the file last changed, seconds since 1970; None where there is no file."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def poll(self, limit: int = CHUNK) -> bool:
        """Read what was appended, at most ``limit`` bytes; return whether anything changed.

        A log that was truncated gets a new index.
        """
        resets = self.resets
        try:
            lines = self.new_lines(limit)
        except OSError:
            self.behind = False
            return False
        reset = self.resets > resets
        index = Index() if reset else self.index
        for line in lines:
            index.add(line)
        self.index = index
        return bool(lines) or reset

    def read(self, location: Location) -> Event | None:
        """Read the event at ``location``; None where the log has been truncated since."""
        try:
            return self._decode(self.resets, location.offset, location.length)
        except OSError:
            return None
