"""SQL over events and records of runs, live or ended, in a database without file access."""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import duckdb
import pyarrow
import pyarrow.dataset
import pyarrow.fs

from esper.karn.grown_runs import inspect_either, is_run_or_grown
from esper.karn.runs import RunInfo, config_of, find_runs
from esper.karn.views import (
    METRIC_NAMES,
    TASKS,
    VIEWS,
    WORDS,
    event_table,
    sql_literal,
    view_definitions,
)
from esper.leyline import former_names
from esper.leyline.errors import UsageError
from esper.leyline.events import EVENTS
from esper.leyline.events.parts import DamagedPart, check_part, parts_of, write_lines
from esper.leyline.notices import notice
from esper.leyline.phases import track
from esper.leyline.records import (
    GymLayout,
    Layout,
    Record,
    VerifiedRecords,
    record_files,
    schema_of,
)


class EventTables:
    """The lines of runs: the view ``event_lines``, and over it one table per kind of event.

    Parts of long runs are read where they are. The other lines are checked one by one and written
    to files of the same form in ``folder``, so that a query of a long run needs no more memory than
    one of a short run.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, list[Path]] = defaultdict(list)
        self._damage: Counter[str] = Counter()

    def add(self, run: Path, name: str) -> None:
        """Add the lines that a run has now, as those of ``name`` in the column ``run``.

        A damaged part is left out, with one line on stderr.

        Raises:
            OSError: the file has vanished, or the folder is full.
        """
        with (run / "events.jsonl").open("rb") as file:
            for part in parts_of(run, file):
                try:
                    check_part(part)
                except DamagedPart as error:
                    notice(f"warning: {error}; its events are left out")
                    self._damage[name] += 1
                else:
                    # A link, whose name means nothing else to the database.
                    link = self._new_file()
                    link.symlink_to(part.path.absolute())
                    self._files[name].append(link)
            file.seek(0)
            target = self._new_file()
            write_lines(file, target)
            self._files[name].append(target)

    def _new_file(self) -> Path:
        return self._folder / f"lines-{len(list(self._folder.iterdir()))}.parquet"

    def register(self, database: duckdb.DuckDBPyConnection) -> Counter[str]:
        """Create the views; return how many lines of each run are no events.

        A damaged part counts as one line. Of all files, a query may then read only those of the
        views, once external access is off.
        """
        texts = {n: [sql_literal(str(f)) for f in files] for n, files in self._files.items()}
        paths = ", ".join(path for paths in texts.values() for path in paths)
        database.execute(f"SET allowed_paths = [{paths}]")
        selections = [
            f"SELECT {sql_literal(name)} AS run, event_type, data "
            f"FROM read_parquet([{', '.join(paths)}])"
            for name, paths in texts.items()
        ]
        none = "SELECT '' AS run, '' AS event_type, '' AS data WHERE false"
        database.execute(f"CREATE VIEW event_lines AS {' UNION ALL '.join(selections or [none])}")
        for kind in EVENTS:
            database.execute(f"CREATE VIEW {kind.lower()} AS {event_table(kind)}")
        sql = "SELECT run, count(*) FROM event_lines WHERE event_type IS NULL GROUP BY run"
        return self._damage + Counter(dict(database.execute(sql).fetchall()))


RECORD_VIEWS: Final = ("records", "gym_records", "record_files")
"""The views over records: a row per environment and step, of growing networks and of Gymnasium
tasks, and a row per file."""

_TEXT, _INTEGER = pyarrow.string(), pyarrow.int64()
_NAMES = pyarrow.list_(_TEXT)
_FILES = {
    "run": (_TEXT, ""),
    "round": (_INTEGER, "header.round"),
    "policy": (_TEXT, "header.policy"),
    "episodes": (_INTEGER, "header.episodes"),
    "steps": (_INTEGER, "header.steps"),
    "bytes": (_INTEGER, ""),
    "draws": (_NAMES, ""),
    "host_features": (_NAMES, "header.layout.host"),
    "slot_features": (_NAMES, "header.layout.slots"),
    "critic_features": (_NAMES, "header.layout.critic"),
    "heads": (_NAMES, "header.layout.heads"),
    "ops": (_NAMES, ""),
    "blueprints": (_NAMES, ""),
    "format": (_INTEGER, "header.format"),
    "esper": (_TEXT, "header.esper"),
    "path": (_TEXT, ""),
}
"""Columns of the view ``record_files``: type, and attribute of a record where it is one."""
_NO_LAYOUT = Layout(
    host=["-"], slots=["-"], critic=["-"], heads=["-"], options={"op": ["-"], "blueprint": ["-"]}
)
"""Gives the views their columns where there is no record."""

_LISTS = {
    "host": "FLOAT[]",
    "slots": "FLOAT[][]",
    "critic": "FLOAT[]",
    "legal_ops": "BOOLEAN[][]",
    "legal_blueprints": "BOOLEAN[][]",
    "actions": "SMALLINT[]",
    "task": "VARCHAR",
    "draw": "VARCHAR",
}
"""Types of the columns whose type in the files depends on the layout."""


_GYM_LISTS = {
    "observation": "FLOAT[]",
    "legal": "BOOLEAN[]",
    "actions": "INTEGER[]",
    "numbers": "FLOAT[]",
}
"""The same of Gymnasium tasks; of those that a task has not, the values are null."""
_NO_GYM = GymLayout(gym="-", features=1, options=[1], components=1)


def create_record_views(
    database: duckdb.DuckDBPyConnection, runs: Mapping[Path, str], skip_bad: bool, folder: Path
) -> None:
    """Create or replace the views over records.

    Args:
        database: receives the views.
        runs: the name of each run directory.
        skip_bad: whether to leave out damaged records, each with one line on stderr.
        folder: where the records stay readable until the database is closed.

    Raises:
        UsageError: a record is damaged, and ``skip_bad`` is false.
    """
    rows: list[dict[str, Any]] = []
    groups: list[tuple[str, Layout | GymLayout, list[str]]] = []
    for record in VerifiedRecords(list(runs), skip_bad):
        name, layout = runs[record.run], record.header.layout or record.header.gym
        assert layout is not None, record.path
        rows.append(_record_row(name, record))
        if not groups or groups[-1][:2] != (name, layout):
            groups.append((name, layout, []))
        path = _lasting_path(record, folder / f"record-{len(rows)}.parquet")
        groups[-1][2].append(str(path))
    # Without any record, the views have their columns all the same.
    groups += [("", _NO_LAYOUT, []), ("", _NO_GYM, [])]
    selections: dict[str, list[str]] = {"records": [], "gym_records": []}
    for number, (name, layout, paths) in enumerate(groups):
        view = "gym_records" if isinstance(layout, GymLayout) else "records"
        selection = _selection(layout, f"records_{number}")
        # One table, of which only the columns that a query needs are read.
        schema, files = schema_of(layout), pyarrow.fs.LocalFileSystem()
        data = pyarrow.dataset.dataset(paths, schema, format="parquet", filesystem=files)
        database.register(f"records_{number}", data)
        selections[view].append(f"SELECT {sql_literal(name)} AS run, {selection}")
    for view, parts in selections.items():
        database.execute(f"CREATE OR REPLACE VIEW {view} AS {' UNION ALL '.join(parts)}")
    schema = pyarrow.schema([(column, kind) for column, (kind, _) in _FILES.items()])
    database.register("files_of_records", pyarrow.Table.from_pylist(rows, schema))
    database.execute("CREATE OR REPLACE VIEW record_files AS SELECT * FROM files_of_records")


def _selection(layout: Layout | GymLayout, table: str) -> str:
    """The columns of a view over the records with a layout."""
    if isinstance(layout, GymLayout):
        present = schema_of(layout).names
        columns = [
            f"{name if name in present else 'NULL'}::{_GYM_LISTS[name]} AS {name}"
            if name in _GYM_LISTS
            else name
            for name in schema_of(_NO_GYM).names
        ]
        return f"{', '.join(columns)}, {sql_literal(layout.gym)} AS gym FROM {table}"
    casts = ", ".join(f"{column}::{kind} AS {column}" for column, kind in _LISTS.items())
    ops = ", ".join(map(sql_literal, layout.options["op"]))
    return f"* REPLACE ({casts}), [{ops}][actions[1] + 1] AS op FROM {table}"


def _lasting_path(record: Record, link: Path) -> Path:
    """A path at which the record stays as it was verified.

    A live run with ``--record-last`` removes its records while a query reads them.
    """
    try:
        os.link(record.path, link)
    except OSError:
        if config_of(record.run).get("settings", {}).get("record_last") is None:
            return record.path
        link.write_bytes(record.content)
    return link


def _record_row(name: str, record: Record) -> dict[str, Any]:
    layout = record.header.layout
    options = layout.options if layout else {}
    return {
        "run": name,
        "bytes": len(record.content),
        "draws": list(record.header.tasks),
        "ops": options.get("op"),
        "blueprints": options.get("blueprint"),
        "path": str(record.path),
        **{
            column: attrgetter(attribute)(record)
            for column, (_, attribute) in _FILES.items()
            if attribute and (layout or not attribute.startswith("header.layout"))
        },
    }


ROWS = 16_384
"""Rows per batch of a result."""

MEMORY_MEGABYTES = 256
"""Memory of the database; what needs more goes to a temporary folder. Each thread needs its own."""

_NAMES_RECORDS = re.compile(rf"\b({'|'.join(RECORD_VIEWS)})\b", re.IGNORECASE)

_RUNS = pyarrow.schema(
    [
        ("run", _TEXT),
        ("path", _TEXT),
        ("status", _TEXT),
        ("policy", _TEXT),
        ("tasks", _NAMES),
        ("rounds_done", _INTEGER),
        ("rounds_total", _INTEGER),
        ("gain", pyarrow.float64()),
        ("validation_gain", pyarrow.float64()),
        ("envs", _INTEGER),
        ("episode_length", _INTEGER),
        ("device", _TEXT),
        ("amp_enabled", pyarrow.bool_()),
        ("amp_dtype", _TEXT),
        ("schema", _INTEGER),
        ("resumed", _INTEGER),
        ("unreadable", _INTEGER),
        ("started", pyarrow.float64()),
        ("last_activity", pyarrow.float64()),
        ("bytes", _INTEGER),
        ("settings", _TEXT),
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
            former = (n for n in former_names.EVENTS if re.search(rf"\b{n}\b", sql, re.IGNORECASE))
            name = next(former, None)
            hint = f"; {name} of the prior system: {former_names.EVENTS[name]}" if name else ""
            raise UsageError(f"SQL: {_message(error)}{hint}") from error
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
        rows = list(_rows(infos, database, tables.register(database)))
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
        for path, name in track(self._names.items(), "reading the runs", "runs"):
            try:
                if _has_events(path):
                    tables.add(path, name)
                yield name, inspect_either(path)
            except (OSError, UsageError) as error:
                notice(f"warning: {path} is left out ({error})")


def _runs_at(paths: list[Path]) -> list[Path]:
    runs: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"run: there is no directory {path}; esper runs lists your runs")
        inside = (
            [path]
            if _is_readable(path)
            else [p for p in find_runs(path, is_run_or_grown) if _is_readable(p)]
        )
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
