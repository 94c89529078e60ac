"""The events of a run, read as they grow.

Events of rounds are kept decoded. Of the large events of steps, which hold one value per
environment, only the position in the log is kept, and a view reads them again when it needs them:
the lines of a million environment steps are about 200 MiB.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
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
)
from esper.leyline.events.reader import CHUNK, EventReader, try_decode

E = TypeVar("E", bound=Event)

LOCATED: tuple[type[StepEvent], ...] = (
    *(EpochCompleted, DecisionsMade),
    *(SeedContributions, SeedSignalsMeasured),
)
"""Kinds of events of which only the position is kept; they are read again on demand."""

CACHED = 2048
"""Maximum number of decoded step events in the cache."""

# Skipping the values of all environments halves the time to open a large file.
_OUTLINES = {
    msgspec.defstruct(
        kind.__name__, (), bases=(StepEvent,), kw_only=True, tag=event_type(kind)
    ): kind
    for kind in LOCATED
}
_outline = msgspec.json.Decoder(
    Union[tuple(kind for kind in EVENTS.values() if kind not in LOCATED) + tuple(_OUTLINES)]  # noqa: UP007
)


@dataclass(slots=True)
class Kept:
    """The events of one kind, with the numbers of their lines."""

    lines: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
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
    kept: dict[type[Event], Kept] = field(default_factory=dict)
    places: dict[type[Event], list[Place]] = field(
        default_factory=lambda: {kind: [] for kind in LOCATED}
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
        learned = isinstance(event, PPOUpdateCompleted)
        kind = PPOUpdateCompleted if learned else type(event)
        if kind in _OUTLINES:
            place = Place(self.lines, offset, len(line), event.round, event.step)
            self.places[_OUTLINES[kind]].append(place)
        else:
            kept = self.kept.setdefault(kind, Kept())
            # `until` may run on another thread and searches `lines`, so the event is added first.
            kept.events.append(event)
            kept.lines.append(self.lines)

    def until(self, kind: type[E], line: int | None = None) -> Sequence[E]:
        """Return the events of a kind in order, up to line ``line`` or all."""
        kept = self.kept.get(kind, Kept())
        end = len(kept.lines) if line is None else bisect_right(kept.lines, line)
        return kept.events[:end]  # type: ignore[return-value]


class EventLog(EventReader):
    """Follows the events of a run directory while they are written.

    Args:
        run: the run directory; the file need not exist yet.
    """

    def __init__(self, run: Path):
        super().__init__(run)
        self.index = Index()
        self._decoded: OrderedDict[tuple[int, int], Event] = OrderedDict()

    @property
    def cut_off(self) -> int:
        """Bytes after the last complete line, of a line that is partly written."""
        return max(0, self.size - self.index.length)

    def modified(self) -> float | None:
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
            lines = self.appended(limit)
        except OSError:
            self.behind = False
            return False
        reset = self.resets > resets
        index = Index() if reset else self.index
        for line in lines:
            index.add(line)
        if reset:
            self._decoded.clear()
        self.index = index
        return bool(lines) or reset

    def read(self, place: Place) -> Event | None:
        """Read the event at ``place``; None where the log has been truncated since."""
        key = (self.resets, place.offset)
        found = self._decoded.get(key)
        if found is None:
            try:
                found = try_decode(self.read_at(place.offset, place.length))
            except OSError:
                return None
            if found is None:
                return None
            self._decoded[key] = found
            while len(self._decoded) > CACHED:
                self._decoded.popitem(last=False)
        return found
