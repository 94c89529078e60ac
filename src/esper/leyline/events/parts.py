"""The earlier events of a long run: compressed Parquet files in the folder ``events`` of the run.

Together with ``events.jsonl``, the files are one log: first the lines of the parts, then those of
``events.jsonl``. The name of a part says which bytes of the log it holds, and has digests of its
first line and of the file, by which damage and another file in its place are noticed. If
``events.jsonl`` begins with the first line of a part, a process died while it moved lines between
the two; the part and those after it are then ignored, because ``events.jsonl`` holds all their
lines.
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from esper.leyline.events import (
    DecisionsMade,
    EpochCompleted,
    SeedSignalsMeasured,
    event_type,
    try_decode,
)

FOLDER: Final = "events"
"""Name of the folder of parts in a run directory."""

SCHEMA: Final = pyarrow.schema(
    [
        ("event_type", pyarrow.string()),
        ("time", pyarrow.float64()),
        ("round", pyarrow.int64()),
        ("step", pyarrow.int64()),
        ("line", pyarrow.int64()),
        ("data", pyarrow.string()),
    ]
)
"""``data`` is the event's JSON line, ``line`` its number within the part, from 0; the other columns
are for filtering, and null in a line that could not be read."""

GROUP_BYTES = 2**20
"""Bytes of lines per row group, which readers of batches hold several of."""

COMPRESSION_LEVEL = 3
"""Level of zstd. Level 9 takes five times as long and saves a sixth."""

LARGE = tuple(event_type(kind) for kind in (EpochCompleted, DecisionsMade, SeedSignalsMeasured))
"""Kinds with row groups of their own, so that a reader of the others need not decompress them."""

_NAME = re.compile(r"(\d{14,18})-(\d{14,18})-([0-9a-f]{16})-([0-9a-f]{16})\.parquet")


@dataclass(frozen=True, slots=True)
class Part:
    """One file of earlier events, or a gap where one is missing.

    Attributes:
        path: the file.
        start: bytes of the log before its first line.
        end: bytes of the log up to the end of its last line.
        first: digest of its first line.
        content: digest of the file.
    """

    path: Path
    start: int
    end: int
    first: str
    content: str


class DamagedPart(ValueError):
    """A part cannot be read; the message says why in one line."""


def part_name(start: int, lines: list[bytes], content: bytes) -> str:
    """The name of the part with ``lines``, whose first begins ``start`` bytes into the log.

    Args:
        start, lines: what it holds.
        content: bytes of the file.
    """
    end = start + sum(map(len, lines))
    return f"{start:014d}-{end:014d}-{_digest(lines[0])}-{_digest(content)}.parquet"


def parts_of(run: Path, events: BinaryIO) -> list[Part]:
    """The parts of a run in order, without those whose lines ``events.jsonl`` holds.

    Args:
        run: the run directory.
        events: its ``events.jsonl``, opened before, so that lines which move to a part from now on
            are still in it; its position changes.
    """
    parts = _all_parts(run)
    return _without_gaps(run, parts[: _superseded_from(parts, events)])


def superseded_parts(run: Path, events: BinaryIO) -> list[Part]:
    """The parts that ``parts_of`` leaves out, the last one first."""
    parts = _all_parts(run)
    return parts[_superseded_from(parts, events) :][::-1]


def _all_parts(run: Path) -> list[Part]:
    try:
        names = os.listdir(run / FOLDER)
    except OSError:
        return []
    matches = filter(None, map(_NAME.fullmatch, names))
    parts = [Part(run / FOLDER / m[0], int(m[1]), int(m[2]), m[3], m[4]) for m in matches]
    return sorted(parts, key=lambda part: (part.start, part.end))


def _superseded_from(parts: list[Part], events: BinaryIO) -> int:
    # Only now: a line that comes after the list of parts was read is in none of them.
    events.seek(0)
    first = events.readline()
    digest = _digest(first) if first.endswith(b"\n") else None
    firsts = [part.first for part in parts]
    return firsts.index(digest) if digest in firsts else len(parts)


def _without_gaps(run: Path, every: list[Part]) -> list[Part]:
    """The parts with one in place of each that is missing, so that they hold every byte once."""
    parts: list[Part] = []
    for part in every:
        end = parts[-1].end if parts else 0
        if part.start > end:
            parts.append(Part(run / FOLDER / "missing", end, part.start, "", ""))
        if part.start >= end and part.end > part.start:
            parts.append(part)
    return parts


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def check_part(part: Part) -> None:
    """Check the whole content of a part.

    Raises:
        DamagedPart: it cannot be read, or differs from what was written.
    """
    _open(part)


def _open(part: Part) -> pyarrow.parquet.ParquetFile:
    try:
        content = part.path.read_bytes()
        if _digest(content) != part.content:
            raise DamagedPart(f"{part.path.name}: its digest does not match")
        return pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
    except (OSError, pyarrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or error
        raise DamagedPart(f"{part.path.name}: {reason}") from error


def read_lines(part: Part, kinds: Iterable[str] = ()) -> list[bytes]:
    """The lines of a part in order, with their newlines.

    Args:
        part: the part.
        kinds: names of the kinds of events to read, besides lines that are not events; all by
            default. Large events of other kinds are not decompressed.

    Raises:
        DamagedPart: it cannot be read, or differs from what was written.
    """
    names, file = list(kinds), _open(part)
    groups = [
        group
        for group in range(file.num_row_groups)
        if not names or _may_hold(file.metadata.row_group(group), names)
    ]
    try:
        columns = ["event_type", "line", "data"]
        table = file.read_row_groups(groups, columns=columns, use_threads=False)
        if names:
            kind = table.column("event_type")
            of_kinds = pyarrow.compute.is_in(kind, value_set=pyarrow.array(names))
            unknown = pyarrow.compute.is_null(kind)
            table = table.filter(pyarrow.compute.or_(of_kinds, unknown))
        lines = table.sort_by("line").column("data").to_pylist()
        return [line.encode() + b"\n" for line in lines]
    except (pyarrow.ArrowException, AttributeError, LookupError) as error:
        raise DamagedPart(f"{part.path.name}: {error}") from error


def _may_hold(group: pyarrow.parquet.RowGroupMetaData, kinds: list[str]) -> bool:
    """Whether a row group may have events of these kinds, or lines that are not events."""
    statistics = group.column(0).statistics
    if statistics is None or not statistics.has_min_max or statistics.null_count != 0:
        return True
    return statistics.min != statistics.max or statistics.min in kinds


def read_text(part: Part) -> bytes:
    """The lines of a part as they were; one unreadable line of its length if it is damaged."""
    try:
        text = b"".join(read_lines(part))
    except DamagedPart:
        text = b""
    is_complete = len(text) == part.end - part.start
    return text if is_complete else b"?" * (part.end - part.start - 1) + b"\n"


def lines_backwards(parts: list[Part]) -> Iterator[bytes]:
    """All lines of parts from the last to the first, without those of damaged parts."""
    for part in reversed(parts):
        try:
            yield from reversed(read_lines(part))
        except DamagedPart:
            continue


def write_part(run: Path, start: int, lines: list[bytes]) -> None:
    """Write a part of a run, whose first line begins ``start`` bytes into the log.

    Raises:
        OSError: the disk failed or is full.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    draft = folder / "part.made"
    try:
        write_lines(lines, draft)
        draft.replace(folder / part_name(start, lines, draft.read_bytes()))
    finally:
        draft.unlink(missing_ok=True)


def write_lines(lines: Iterable[bytes], target: Path) -> None:
    """Write lines to one Parquet file atomically, flushed to the disk; see ``SCHEMA``.

    Memory holds two row groups of them at a time.

    Raises:
        OSError: the disk failed or is full.
    """
    draft = target.with_suffix(".draft")
    try:
        # Not a path: pyarrow would take one such as "s3:/x" for a remote address.
        with draft.open("wb") as file:
            _write(lines, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error
    finally:
        draft.unlink(missing_ok=True)


def _write(lines: Iterable[bytes], file: Any) -> None:
    with pyarrow.parquet.ParquetWriter(
        file,
        SCHEMA,
        compression="zstd",
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=["event_type"],
        data_page_size=GROUP_BYTES,
    ) as writer:
        start = 0
        for chunk in chunks(lines, 2 * GROUP_BYTES):
            for table in _tables(chunk, start):
                groups = -(-table.nbytes // GROUP_BYTES)
                writer.write_table(table, row_group_size=-(-len(table) // groups))
            start += len(chunk)


def chunks(lines: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    """Split lines into lists of at least ``size`` bytes, the last of which may be smaller."""
    chunk: list[bytes] = []
    size_of_chunk = 0
    for line in lines:
        chunk.append(line)
        size_of_chunk += len(line)
        if size_of_chunk >= size:
            yield chunk
            chunk, size_of_chunk = [], 0
    if chunk:
        yield chunk


def _tables(lines: list[bytes], start: int) -> Iterator[pyarrow.Table]:
    """The rows of each row group: every large kind has its own, the others share one."""
    groups: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for number, line in enumerate(lines, start):
        row = _row(line, number)
        groups[row[0] if row[0] in LARGE else ""].append(row)
    for rows in groups.values():
        columns = zip(SCHEMA, zip(*rows, strict=True), strict=True)
        arrays = [pyarrow.array(column, field.type) for field, column in columns]
        yield pyarrow.table(arrays, schema=SCHEMA)


def _row(line: bytes, number: int) -> tuple[Any, ...]:
    event = try_decode(line)
    kind = None if event is None else event_type(type(event))
    time, *numbers = (getattr(event, name, None) for name in ("time", "round", "step"))
    about = time, *(n if n is not None and -(2**63) <= n < 2**63 else None for n in numbers)
    return (kind, *about, number, _text(line.rstrip(b"\n")))


def _text(line: bytes) -> str:
    """A line as text of the same length in bytes, whatever it holds."""
    try:
        return line.decode()
    except UnicodeDecodeError:
        return bytes(byte if byte < 128 else ord("?") for byte in line).decode()
