"""SQL over events and records of runs, live or ended, in a database without file access."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import duckdb
import pyarrow

from esper.karn.event_tables import EventTables, LinesOfRun
from esper.karn.record_views import RECORD_VIEWS, create_record_views
from esper.karn.runs import find_runs, inspect, stored
from esper.karn.sql_text import sql_literal
from esper.karn.views import TASKS, VIEWS, WORDS, event_table, view_definitions
from esper.leyline.errors import UsageError
from esper.leyline.events import EVENTS
from esper.leyline.notices import notice
from esper.leyline.records import record_files

ROWS = 16_384
"""Rows per batch of a result."""

MEMORY_MEGABYTES = 256
"""Memory of the database; what needs more goes to a temporary folder. Each thread needs its own."""

_NAMES_RECORDS = re.compile(rf"\b({'|'.join(RECORD_VIEWS)})\b", re.IGNORECASE)

_RUNS = pyarrow.schema(
    [
        ("run", pyarrow.string()),
        ("path", pyarrow.string()),
        ("status", pyarrow.string()),
        ("policy", pyarrow.string()),
        ("tasks", pyarrow.list_(pyarrow.string())),
        ("rounds_done", pyarrow.int64()),
        ("rounds_total", pyarrow.int64()),
        ("gain", pyarrow.float64()),
        ("validation_gain", pyarrow.float64()),
        ("envs", pyarrow.int64()),
        ("episode_length", pyarrow.int64()),
        ("device", pyarrow.string()),
        ("amp_enabled", pyarrow.bool_()),
        ("amp_dtype", pyarrow.string()),
        ("schema", pyarrow.int64()),
        ("resumed", pyarrow.int64()),
        ("unreadable", pyarrow.int64()),
        ("started", pyarrow.float64()),
        ("last_activity", pyarrow.float64()),
        ("bytes", pyarrow.int64()),
        ("settings", pyarrow.string()),
    ]
)
"""Columns of the view ``runs``. ``started`` and ``last_activity`` are seconds since 1970;
``resumed`` counts how often the run was resumed, ``unreadable`` the lines that were skipped;
``settings`` is JSON."""


class Store:
    """Views over the events that some runs have when the store is created, and their records.

    Args:
        places: run directories, or directories that contain some at any depth.
        skip_bad: whether to leave out damaged records, each with one line on stderr.

    Attributes:
        unreadable: number of lines skipped in all runs; a warning on stderr shows it.

    Raises:
        UsageError: a place contains no run.
    """

    def __init__(self, places: list[Path], skip_bad: bool = False):
        self._names, self._skip_bad = _names(_runs_at(places)), skip_bad
        self._records_opened = False
        self._folder = TemporaryDirectory(prefix="esper-query-")
        self._events = EventTables(Path(self._folder.name))
        rows = list(self._read_all())
        self.unreadable = sum(row["unreadable"] for row in rows)
        if self.unreadable:
            lines = "line" if self.unreadable == 1 else "lines"
            notice(f"warning: skipped {self.unreadable} unreadable {lines}")
        self._database = self._open(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._database.close()
        self._folder.cleanup()

    def query(self, sql: str) -> pyarrow.Table:
        """Run one SELECT and return its result.

        Raises:
            UsageError: ``sql`` is not one SELECT, or it is invalid; or it names records, of which
                one is damaged.
        """
        with self.batches(sql) as batches:
            return batches.read_all()

    @contextmanager
    def batches(self, sql: str) -> Iterator[pyarrow.RecordBatchReader]:
        """Run one SELECT and return a reader of its result, which memory need not hold.

        Raises:
            UsageError: see ``query``; also while the result is read.
        """
        if _NAMES_RECORDS.search(sql):
            self._open_records()
        try:
            statements = self._database.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise UsageError("SQL: must be one SELECT; runs are read, never written")
            yield self._sql(statements[0]).to_arrow_reader(ROWS)
        except (duckdb.Error, pyarrow.ArrowException) as error:
            raise UsageError(f"SQL: {_message(error)}") from error
        except RuntimeError as error:
            # What duckdb makes of Ctrl-C within a query.
            if "interrupted" in str(error):
                raise KeyboardInterrupt from error
            raise

    def _sql(self, statement: duckdb.Statement) -> duckdb.DuckDBPyRelation:
        return self._database.sql(statement)

    def columns(self) -> dict[str, list[tuple[str, str]]]:
        """Return the names and types of the columns of each view."""
        self._open_records()
        return {
            view: [
                (row[0], row[1]) for row in self._database.execute(f"DESCRIBE {view}").fetchall()
            ]
            for view in (*VIEWS, *RECORD_VIEWS)
        }

    def _open_records(self) -> None:
        """Check the records and create their views, when they are first needed."""
        if not self._records_opened:
            create_record_views(self._database, self._names, self._skip_bad)
            self._records_opened = True

    def _read_all(self) -> Iterator[dict[str, Any]]:
        """Read all runs; one that vanishes meanwhile is one warning."""
        for path, name in self._names.items():
            try:
                yield self._read(path, name)
            except (OSError, UsageError) as error:
                notice(f"warning: {path} is left out ({error})")

    def _read(self, path: Path, name: str) -> dict[str, Any]:
        """Read the lines of a run; return its row of the view ``runs``."""
        nothing = LinesOfRun(None, 0, 0)
        return _row(path, name, self._events.add(path, name) if _has_events(path) else nothing)

    def _open(self, rows: list[dict[str, Any]]) -> duckdb.DuckDBPyConnection:
        database = duckdb.connect(":memory:")
        database.execute(f"SET memory_limit = '{MEMORY_MEGABYTES}MB'")
        database.execute("SET threads = 1")
        database.execute(f"SET temp_directory = {sql_literal(self._folder.name)}")
        self._events.register(database)
        for name in EVENTS:
            database.execute(f"CREATE VIEW {name.lower()} AS {event_table(name)}")
        database.register("runs", pyarrow.Table.from_pylist(rows, _RUNS))
        database.execute(f"CREATE VIEW tasks_of_rounds AS {TASKS}")
        database.execute(f"CREATE VIEW words AS {WORDS}")
        for view, sql in view_definitions(self._events.metrics).items():
            database.execute(f"CREATE VIEW {view} AS {sql}")
        # From here on, SQL can read neither Python variables nor other files than those of events.
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        return database


def _runs_at(places: list[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        if not place.is_dir():
            raise UsageError(f"run: there is no directory {place}; esper runs lists your runs")
        here = [place] if _is_readable(place) else [p for p in find_runs(place) if _is_readable(p)]
        if not here:
            raise UsageError(
                f"run: {place} has no run with events or records; esper runs lists your runs"
            )
        found += here
    return list(dict.fromkeys(path.resolve() for path in found))


def _is_readable(path: Path) -> bool:
    return _has_events(path) or bool(record_files(path))


def _has_events(path: Path) -> bool:
    return (path / "events.jsonl").is_file()


def _names(paths: list[Path]) -> dict[Path, str]:
    """Name each run by its directory, or by the whole path where two share a name."""
    names = [path.name for path in paths]
    return {path: _text(path.name if names.count(path.name) == 1 else str(path)) for path in paths}


def _text(name: str) -> str:
    """Escape the bytes of a name that are not valid text."""
    return name.encode(errors="backslashreplace").decode()


def _row(path: Path, name: str, lines: LinesOfRun) -> dict[str, Any]:
    info = inspect(path)
    first_values = {
        field: getattr(lines.first, field, None)
        for field in ("envs", "episode_length", "device", "amp_enabled", "amp_dtype", "schema")
    }
    values = first_values | {
        "run": name,
        "path": _text(str(path)),
        "resumed": max(0, lines.processes - 1),
        "unreadable": lines.unreadable,
        "settings": json.dumps(stored(path).get("settings", {})),
        **{
            field: getattr(info, field)
            for field in _RUNS.names
            if hasattr(info, field) and field != "path"
        },
    }
    return {field: value if _fits(value) else None for field, value in values.items()}


def _fits(value: Any) -> bool:
    """Whether a column can hold a value; a damaged event may have a number of any size."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _message(error: Exception) -> str:
    """The message of a database error without the lines that quote the query."""
    return " ".join(str(error).split("\n\nLINE")[0].split("\nLINE")[0].split())
