"""The event file of a run, read as it grows.

What comes once a round is kept decoded. What comes once a step and holds all environments is only
located, and read again when a view needs it: a million environment steps are a hundred megabytes.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar, Union

import msgspec

from esper.leyline.events import (
    EVENTS,
    DecisionsMade,
    EpochCompleted,
    Event,
    SeedSignalsMeasured,
    StepEvent,
    decode,
    event_type,
)

E = TypeVar("E", bound=Event)

LOCATED: tuple[type[StepEvent], ...] = (EpochCompleted, DecisionsMade, SeedSignalsMeasured)
"""Kinds that are read again when they are wanted."""

CHUNK = 16 * 2**20
"""Bytes taken in at a time, so that a large file shows its first part early."""
CACHED = 2048
"""Decoded step events kept; an episode and its neighbours."""

# Passing over the values of all environments makes a large file open in half the time.
_OUTLINES = {
    msgspec.defstruct(
        kind.__name__, (), bases=(StepEvent,), kw_only=True, tag=event_type(kind)
    ): kind
    for kind in LOCATED
}
_outline = msgspec.json.Decoder(
    Union[tuple(kind for kind in EVENTS.values() if kind not in LOCATED) + tuple(_OUTLINES)]  # noqa: UP007
)
_MARK = 256
"""Bytes at the end of the last line that must still be there when the file has grown; the time is
among them, so that a round that is run again with the same bits is told from the first."""


@dataclass(slots=True)
class Kept:
    """The events of one kind, with the numbers of their lines."""

    lines: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an event of a step stands in the file."""

    line: int
    offset: int
    length: int
    round: int
    step: int


@dataclass(slots=True)
class Index:
    """What is known of a file. It only grows: a file that was cut gets a new one.

    Attributes:
        lines: complete lines that were read.
        corrupt: of these, lines that are no JSON.
        unknown: of these, lines that this version does not know.
        length: of all complete lines.
    """

    lines: int = 0
    corrupt: int = 0
    unknown: int = 0
    length: int = 0
    kept: dict[type[Event], Kept] = field(default_factory=dict)
    places: dict[type[Event], list[Place]] = field(
        default_factory=lambda: {kind: [] for kind in LOCATED}
    )
    last_time: float | None = None
    mark: bytes = b""
    mark_offset: int = 0

    def add(self, line: bytes) -> None:
        """Take in one line, its newline left out."""
        offset, self.length, self.lines = self.length, self.length + len(line) + 1, self.lines + 1
        self.mark = line[-_MARK:]
        self.mark_offset = offset + len(line) - len(self.mark)
        try:
            event = _outline.decode(line)
        except msgspec.ValidationError:
            self.unknown += 1
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.corrupt += 1
            return
        self.last_time = event.time
        kind = type(event)
        if kind in _OUTLINES:
            place = Place(self.lines, offset, len(line), event.round, event.step)
            self.places[_OUTLINES[kind]].append(place)
        else:
            kept = self.kept.setdefault(kind, Kept())
            # Readers look up by line: the event must be there before its number is.
            kept.events.append(event)
            kept.lines.append(self.lines)

    def until(self, kind: type[E], line: int | None = None) -> Sequence[E]:
        """Events of a kind in order, up to a line or all."""
        kept = self.kept.get(kind, Kept())
        end = len(kept.lines) if line is None else bisect_right(kept.lines, line)
        return kept.events[:end]  # type: ignore[return-value]


class EventLog:
    """``events.jsonl`` of a run directory, followed while it is written.

    Args:
        run: the run directory; the file need not exist yet.
    """

    def __init__(self, run: Path):
        self.path = run / "events.jsonl"
        self.index = Index()
        self.size = 0
        """Bytes of the file when it was last looked at."""
        self.behind = True
        """Whether there may be complete lines left to read."""
        self.resets = 0
        """How often the file was found cut, as it is when a run is resumed."""
        self._decoded: OrderedDict[tuple[int, int], Event] = OrderedDict()

    @property
    def cut_off(self) -> int:
        """Bytes behind the last complete line: a line that is half written."""
        return max(0, self.size - self.index.length)

    def modified(self) -> float | None:
        """When the file last changed, seconds since 1970; None while there is none."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def poll(self, limit: int = CHUNK) -> bool:
        """Take in what was appended, ``limit`` bytes at most; whether anything changed.

        A file that was cut, even if it has grown past its old length since, is read anew.
        """
        try:
            file = self.path.open("rb")
        except OSError:
            self.behind = False
            return False
        with file:
            self.size = file.seek(0, 2)
            cut = self._was_cut(file)
            index = Index() if cut else self.index
            file.seek(index.length)
            data = file.read(limit)
            end = data.rfind(b"\n") + 1
            # A line may be longer than the limit.
            while not end and len(data) == limit:
                limit *= 2
                file.seek(index.length)
                data = file.read(limit)
                end = data.rfind(b"\n") + 1
        for line in data[:end].split(b"\n")[:-1]:
            index.add(line)
        self.behind = len(data) == limit
        if cut:
            self.resets += 1
            self._decoded.clear()
        self.index = index
        return bool(end) or cut

    def _was_cut(self, file: BinaryIO) -> bool:
        file.seek(self.index.mark_offset)
        return file.read(len(self.index.mark)) != self.index.mark

    def read(self, place: Place) -> Event | None:
        """The event at ``place``; None where the file has been cut since."""
        key = (self.resets, place.offset)
        found = self._decoded.get(key)
        if found is None:
            try:
                with self.path.open("rb") as file:
                    file.seek(place.offset)
                    found = decode(file.read(place.length))
            except (OSError, msgspec.DecodeError):
                return None
            self._decoded[key] = found
            while len(self._decoded) > CACHED:
                self._decoded.popitem(last=False)
        return found
