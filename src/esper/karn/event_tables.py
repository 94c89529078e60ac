"""Event lines of runs as tables of a database, which reads them in batches.

Parts of long runs are read where they are. The other lines are checked one by one; beyond
``IN_MEMORY`` bytes they are kept in Parquet files of a temporary folder, so that a query of a long
run needs no more memory than one of a short run.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
import pyarrow.dataset
import pyarrow.fs

from esper.leyline.events import (
    EVENTS,
    PPOUpdateCompleted,
    TrainingStarted,
    event_type,
)
from esper.leyline.events.part_writer import PART_BYTES, write_part
from esper.leyline.events.parts import (
    SCHEMA,
    DamagedPart,
    Part,
    parts_of,
    read_lines,
    read_summary,
)
from esper.leyline.events.reader import EventReader
from esper.leyline.notices import notice

IN_MEMORY = 32 * 2**20
"""Bytes of lines of ``events.jsonl`` that are kept in memory, of all runs together."""

_BATCH_LINES = 4096
_LINES = pyarrow.schema([("run", pyarrow.string()), ("line", pyarrow.large_string())])


@dataclass(frozen=True, slots=True)
class LinesOfRun:
    """What the lines of a run tell about it.

    Attributes:
        first: its first start event; None where it has none.
        processes: number of its start events.
        unreadable: number of lines that were skipped; a damaged part counts as one.
    """

    first: TrainingStarted | None
    processes: int
    unreadable: int


class EventTables:
    """The lines of runs, one table per kind of event with the columns ``run`` and ``line``.

    Args:
        folder: a folder for lines that do not fit into memory.
        check: whether to read every part beforehand and to leave out those that are damaged, each
            with one line on stderr; by default a damaged part fails in the query.

    Attributes:
        metrics: names of the metrics that updates report.
    """

    def __init__(self, folder: Path, check: bool = False):
        self.metrics: set[str] = set()
        self._check = check
        self._folder = folder
        self._parts: dict[str, list[Part]] = defaultdict(list)
        self._moved: dict[str, list[Path]] = defaultdict(list)
        self._batches: dict[str, list[pyarrow.RecordBatch]] = defaultdict(list)
        self._held = 0

    def add(self, run: Path, name: str) -> LinesOfRun:
        """Add the lines that a run has now.

        Args:
            run: its directory.
            name: its name in the column ``run``.

        Raises:
            UsageError: its event file cannot be read.
            OSError: the file has vanished, or the folder is full.
        """
        with (run / "events.jsonl").open("rb") as file:
            unreadable = processes = 0
            for part in parts_of(run, file):
                try:
                    summary = read_summary(part.path)
                    if self._check:
                        read_lines(part)
                except DamagedPart as error:
                    notice(f"warning: {error}; its events are left out")
                    unreadable += 1
                    continue
                self._parts[name].append(part)
                self.metrics |= set(summary.metrics)
                unreadable += summary.unreadable
                processes += summary.started
            first = _first_start(self._parts[name])
            reader = EventReader(run)
            starts = self._add_live(reader, file, name)
        return LinesOfRun(
            first or (starts[0] if starts else None),
            processes + len(starts),
            unreadable + reader.unreadable,
        )

    def _add_live(self, reader: EventReader, file: Any, name: str) -> list[TrainingStarted]:
        """Add the lines of ``events.jsonl``; returns its start events."""
        file.seek(0)
        starts: list[TrainingStarted] = []
        pending: list[tuple[str, bytes]] = []
        size = 0
        for line, event in reader.events_in(file):
            pending.append((event_type(type(event)), line))
            size += len(line)
            if size >= PART_BYTES:
                self._keep(name, pending, size)
                pending, size = [], 0
            if isinstance(event, TrainingStarted):
                starts.append(event)
            if isinstance(event, PPOUpdateCompleted):
                self.metrics.update(event.metrics)
        self._keep(name, pending, size)
        return starts

    def _keep(self, name: str, lines: list[tuple[str, bytes]], size: int) -> None:
        if self._held + size > IN_MEMORY:
            target = self._folder / f"{sum(map(len, self._moved.values()))}.parquet"
            write_part((line for _, line in lines), target)
            self._moved[name].append(target)
            return
        self._held += size
        kinds = defaultdict(list)
        for kind, line in lines:
            kinds[kind].append(line)
        for kind, own in kinds.items():
            for begin in range(0, len(own), _BATCH_LINES):
                self._batches[kind].append(_batch(name, own[begin : begin + _BATCH_LINES]))

    def register(self, database: duckdb.DuckDBPyConnection) -> None:
        """Create the view ``lines_<kind>`` for each kind of event."""
        parts = {name: [part.path for part in found] for name, found in self._parts.items()}
        earlier, later = (
            _register(database, parts, "parts"),
            _register(database, self._moved, "moved"),
        )
        for kind in EVENTS:
            table = f"live_{kind.lower()}"
            database.register(table, pyarrow.Table.from_batches(self._batches[kind], _LINES))
            # In the order in which the lines were written.
            selections = [
                *(f"{select} WHERE event_type = '{kind}'" for select in earlier),
                f"SELECT run, line FROM {table}",
                *(f"{select} WHERE event_type = '{kind}'" for select in later),
            ]
            sql = " UNION ALL ".join(selections)
            database.execute(f"CREATE VIEW lines_{kind.lower()} AS {sql}")

    def damaged(self) -> list[DamagedPart]:
        """Read every part; what is wrong with those that are damaged, in one line each."""
        found = []
        for parts in self._parts.values():
            for part in parts:
                try:
                    read_lines(part)
                except DamagedPart as error:
                    found.append(error)
        return found


def _first_start(parts: Iterable[Part]) -> TrainingStarted | None:
    for part in parts:
        try:
            lines = read_lines(part, [event_type(TrainingStarted)])
        except DamagedPart:
            continue
        for _, event in EventReader(part.path.parent).events_in(lines):
            if isinstance(event, TrainingStarted):
                return event
        return None
    return None


def _register(
    database: duckdb.DuckDBPyConnection, files: dict[str, list[Path]], prefix: str
) -> list[str]:
    """Register the files of each run; returns the SQL that selects the lines of each."""
    selections = []
    for number, (name, paths) in enumerate(files.items()):
        if paths:
            database.register(f"{prefix}_{number}", _dataset(paths))
            select = f"SELECT {_text(name)} AS run, data AS line FROM {prefix}_{number}"
            selections.append(select)
    return selections


def _batch(name: str, lines: list[bytes]) -> pyarrow.RecordBatch:
    names = pyarrow.array([name] * len(lines), pyarrow.string())
    texts = pyarrow.array(lines, pyarrow.binary()).cast(pyarrow.large_string())
    return pyarrow.record_batch([names, texts], schema=_LINES)


def _dataset(paths: list[Path]) -> pyarrow.dataset.Dataset:
    # Without pre_buffer, memory holds only the columns that are being read.
    options = pyarrow.dataset.ParquetFragmentScanOptions(
        page_checksum_verification=True, pre_buffer=False
    )
    return pyarrow.dataset.dataset(
        [str(path) for path in paths],
        schema=SCHEMA,
        format=pyarrow.dataset.ParquetFileFormat(default_fragment_scan_options=options),
        filesystem=pyarrow.fs.LocalFileSystem(),
    )


def _text(value: str) -> str:
    """A string literal of SQL."""
    return "'" + value.replace("'", "''") + "'"
