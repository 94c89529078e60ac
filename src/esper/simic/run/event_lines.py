"""The event lines of a run as its single writer sees them: their length, and where they are cut."""

import json
import os
import shutil
from pathlib import Path

from esper.leyline.disk import sync
from esper.leyline.events.parts import Part, parts_of, read_text, superseded_parts


def events_length(run: Path) -> int:
    """Bytes of all event lines so far, those of the parts included; 0 without events."""
    try:
        with (run / "events.jsonl").open("rb") as file:
            parts = parts_of(run, file)
            return (parts[-1].end if parts else 0) + file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        return 0


def cut_events(run: Path, length: int, done: int) -> None:
    """Remove the events after the first ``length`` bytes.

    Args:
        run: the run directory.
        length: ``events_length`` at the end of round ``done``.
        done: later lines about rounds up to this one are kept.

    Raises:
        OSError: a file cannot be read or written.
    """
    events = run / "events.jsonl"
    if not events.exists():
        return
    with events.open("rb") as file:
        for part in superseded_parts(run, file):
            part.path.unlink()
        parts = parts_of(run, file)
    # From the part that holds the last byte to keep on.
    tail = [part for part in parts if part.end >= length]
    start = tail[0].start if tail else parts[-1].end if parts else 0
    if tail:
        _reopen(run, tail)
    _cut(events, length - start, done)


def _reopen(run: Path, parts: list[Part]) -> None:
    """Move the lines of the last parts back to the event file.

    The file then begins with the first line of the first of them, by which readers know that they
    are to be left out until they are removed.
    """
    events, draft = run / "events.jsonl", run / "events.draft"
    with draft.open("wb") as file:
        for part in parts:
            file.write(read_text(part))
        with events.open("rb") as latest:
            shutil.copyfileobj(latest, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(events)
    sync(run)
    for part in reversed(parts):
        part.path.unlink(missing_ok=True)


def _cut(events: Path, length: int, done: int) -> None:
    with events.open("r+b") as file:
        start = min(length, events.stat().st_size)
        file.seek(max(start - 1, 0))
        cut_off = start > 0 and file.read(1) != b"\n"
        lines = [line for line in file if line.endswith(b"\n") and _round_of(line) <= done]
        file.seek(start)
        # Write before truncating: a process that dies in between leaves duplicate lines rather
        # than losing some, and the next resume removes the duplicates here.
        file.write(b"\n" * cut_off + b"".join(dict.fromkeys(lines)))
        file.truncate()


def _round_of(line: bytes) -> float:
    """The round of an event line, infinity if it cannot be read."""
    try:
        return float(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
