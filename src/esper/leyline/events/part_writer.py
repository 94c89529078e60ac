"""Writes lines of events to Parquet in the form of ``leyline.events.parts``."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from esper.leyline.events import (
    DecisionsMade,
    EpochCompleted,
    SeedSignalsMeasured,
    event_type,
)
from esper.leyline.events.parts import FOLDER, SCHEMA, part_name
from esper.leyline.events.reader import try_decode

PART_BYTES = 8 * 2**20
"""Bytes of lines per part, unless the settings say otherwise."""

GROUP_BYTES = 2**20
"""Bytes of lines per row group, which readers of batches hold several of."""

COMPRESSION_LEVEL = 3
"""Level of zstd. Level 9 takes five times as long and saves a sixth."""

LARGE = tuple(event_type(kind) for kind in (EpochCompleted, DecisionsMade, SeedSignalsMeasured))
"""Kinds with row groups of their own, so that a reader of the others need not decompress them."""


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
    """Write lines to one Parquet file atomically, flushed to the disk; see ``parts.SCHEMA``.

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
