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

from esper.karn.sql_text import sql_literal
from esper.leyline.events import (
    EVENTS,
    PPOUpdateCompleted,
    TrainingStarted,
    event_type,
)
from esper.leyline.events.part_writer import PART_BYTES, write_lines
from esper.leyline.events.parts import (
    DamagedPart,
    Part,
    parts_of,
    read_lines,
    read_summary,
)
from esper.leyline.events.reader import EventReader
from esper.leyline.notices import notice

IN_MEMORY = 16 * 2**20
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
    Attributes:
        metrics: names of the metrics that updates report.
    """

    def __init__(self, folder: Path):
        self.metrics: set[str] = set()
        self._folder = folder
        self._parts: dict[str, list[Path]] = defaultdict(list)
        self._moved: dict[str, list[Path]] = defaultdict(list)
        self._batches: dict[str, list[pyarrow.RecordBatch]] = defaultdict(list)
        self._held = self._links = 0

    def add(self, run: Path, name: str) -> LinesOfRun:
        """Add the lines that a run has now; a damaged part is left out, with one line on stderr.

        Args:
            run: its directory.
            name: its name in the column ``run``.

        Raises:
            UsageError: its event file cannot be read.
            OSError: the file has vanished, or the folder is full.
        """
        with (run / "events.jsonl").open("rb") as file:
            unreadable = processes = 0
            intact: list[Part] = []
            for part in parts_of(run, file):
                try:
                    summary = read_summary(part)
                except DamagedPart as error:
                    notice(f"warning: {error}; its events are left out")
                    unreadable += 1
                    continue
                intact.append(part)
                self._parts[name].append(self._linked(part.path))
                self.metrics |= set(summary.metrics)
                unreadable += summary.unreadable
                processes += summary.started
            first = _first_start(intact)
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
            target = self._folder / f"lines-{sum(map(len, self._moved.values()))}.parquet"
            write_lines((line for _, line in lines), target)
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
        """Create the view ``lines_<kind>`` for each kind of event.

        Of all files, a query may then read only those of the views, once external access is off.
        """
        files = [
            file for found in (self._parts, self._moved) for own in found.values() for file in own
        ]
        listed = ", ".join(sql_literal(str(file)) for file in files)
        database.execute(f"SET allowed_paths = [{listed}]")
        earlier = [_selection(name, files) for name, files in self._parts.items()]
        later = [_selection(name, files) for name, files in self._moved.items()]
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

    def _linked(self, path: Path) -> Path:
        """A link to a part in the folder, whose name means nothing else to the database."""
        self._links += 1
        link = self._folder / f"part-{self._links}.parquet"
        link.symlink_to(path.absolute())
        return link


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


def _selection(name: str, files: list[Path]) -> str:
    """SQL that selects the lines of a run in files."""
    listed = ", ".join(sql_literal(str(file)) for file in files)
    return f"SELECT {sql_literal(name)} AS run, data AS line FROM read_parquet([{listed}])"


def _batch(name: str, lines: list[bytes]) -> pyarrow.RecordBatch:
    names = pyarrow.array([name] * len(lines), pyarrow.string())
    texts = pyarrow.array(lines, pyarrow.binary()).cast(pyarrow.large_string())
    return pyarrow.record_batch([names, texts], schema=_LINES)
