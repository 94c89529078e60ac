"""SQL over events and records of runs, live or ended, in a database without file access."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import duckdb
import pyarrow

from esper.karn.event_tables import EventTables
from esper.karn.record_views import RECORD_VIEWS, create_record_views
from esper.karn.runs import RunInfo, config_of, find_runs, inspect
from esper.karn.views import METRIC_NAMES, TASKS, VIEWS, WORDS, sql_literal, view_definitions
from esper.leyline.errors import UsageError
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
        paths: run directories, or directories that contain some at any depth.
        skip_bad: whether to leave out damaged records, each with one line on stderr.

    Attributes:
        unreadable: number of lines skipped in all runs; a warning on stderr shows it.

    Raises:
        UsageError: a place contains no run.
    """

    def __init__(self, paths: list[Path], skip_bad: bool = False):
        self._names, self._skip_bad = _names(_runs_at(paths)), skip_bad
        self._records_opened = False
        self._folder = TemporaryDirectory(prefix="esper-query-")
        self._database = duckdb.connect(":memory:")
        rows = self._open()
        self.unreadable = sum(row["unreadable"] for row in rows)
        if self.unreadable:
            lines = "line" if self.unreadable == 1 else "lines"
            notice(f"warning: skipped {self.unreadable} unreadable {lines}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
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
            yield self._database.sql(statements[0]).to_arrow_reader(ROWS)
        except (duckdb.Error, pyarrow.ArrowException) as error:
            raise UsageError(f"SQL: {_message(error)}") from error
        except RuntimeError as error:
            # What duckdb makes of Ctrl-C within a query.
            if "interrupted" in str(error):
                raise KeyboardInterrupt from error
            raise

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
            folder = Path(self._folder.name)
            create_record_views(self._database, self._names, self._skip_bad, folder)
            self._records_opened = True

    def _open(self) -> list[dict[str, Any]]:
        """Create the views over events; returns the rows of the view ``runs``."""
        database, tables = self._database, EventTables(Path(self._folder.name))
        infos = dict(self._read_all(tables))
        database.execute(f"SET memory_limit = '{MEMORY_MEGABYTES}MB'")
        database.execute("SET threads = 1")
        database.execute(f"SET temp_directory = {sql_literal(self._folder.name)}")
        tables.register(database)
        rows = list(_rows(infos, database, tables.unreadable(database)))
        database.register("runs", pyarrow.Table.from_pylist(rows, _RUNS))
        database.execute(f"CREATE VIEW tasks_of_rounds AS {TASKS}")
        database.execute(f"CREATE VIEW words AS {WORDS}")
        names = database.execute(METRIC_NAMES).fetchall()
        for view, sql in view_definitions(name for (name,) in names).items():
            database.execute(f"CREATE VIEW {view} AS {sql}")
        # From here on, SQL can read neither Python variables nor other files than those of events.
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        return rows

    def _read_all(self, tables: EventTables) -> Iterator[tuple[str, RunInfo]]:
        """Read all runs; one that vanishes meanwhile is one warning."""
        for path, name in self._names.items():
            try:
                if _has_events(path):
                    tables.add(path, name)
                yield name, inspect(path)
            except (OSError, UsageError) as error:
                notice(f"warning: {path} is left out ({error})")


def _runs_at(paths: list[Path]) -> list[Path]:
    runs: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"run: there is no directory {path}; esper runs lists your runs")
        inside = [path] if _is_readable(path) else [p for p in find_runs(path) if _is_readable(p)]
        if not inside:
            raise UsageError(
                f"run: {path} has no run with events or records; esper runs lists your runs"
            )
        runs += inside
    return list(dict.fromkeys(path.resolve() for path in runs))


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


def _rows(
    infos: dict[str, RunInfo], database: duckdb.DuckDBPyConnection, unreadable: Counter[str]
) -> Iterator[dict[str, Any]]:
    """The rows of the view ``runs``; facts about a run are those of its first process."""
    starts = defaultdict(list)
    for start in database.sql("SELECT * FROM training_started").to_arrow_table().to_pylist():
        starts[start["run"]].append(start)
    for name, info in infos.items():
        values = starts[name][0] if starts[name] else {}
        values |= {field.name: getattr(info, field.name) for field in fields(info)}
        values |= {
            "run": name,
            "path": _text(str(info.path)),
            "resumed": max(0, len(starts[name]) - 1),
            "unreadable": unreadable[name],
            "settings": json.dumps(config_of(info.path).get("settings", {})),
        }
        yield {field: value if _fits(value) else None for field, value in values.items()}


def _fits(value: Any) -> bool:
    """Whether a column can hold a value; a damaged event may have a number of any size."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _message(error: Exception) -> str:
    """The message of a database error without the lines that quote the query."""
    return " ".join(str(error).split("\n\nLINE")[0].split("\nLINE")[0].split())
