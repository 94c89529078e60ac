"""SQL views over the records of runs, which are read only if a query names them."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow
import pyarrow.dataset
import pyarrow.fs

from esper.karn.runs import config_of
from esper.karn.views import sql_literal
from esper.leyline.records import Layout, Record, RecordHeader, VerifiedRecords, record_schema

RECORD_VIEWS: Final = ("records", "record_files")
"""The views over records: a row per environment and step, and a row per file."""

_NAMES = pyarrow.list_(pyarrow.string())
_FILES = pyarrow.schema(
    [
        ("run", pyarrow.string()),
        ("round", pyarrow.int64()),
        ("policy", pyarrow.string()),
        ("episodes", pyarrow.int64()),
        ("steps", pyarrow.int64()),
        ("bytes", pyarrow.int64()),
        ("draws", _NAMES),
        ("host_features", _NAMES),
        ("slot_features", _NAMES),
        ("critic_features", _NAMES),
        ("heads", _NAMES),
        ("ops", _NAMES),
        ("blueprints", _NAMES),
        ("format", pyarrow.int64()),
        ("esper", pyarrow.string()),
        ("path", pyarrow.string()),
    ]
)
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


def create_record_views(
    database: duckdb.DuckDBPyConnection, runs: Mapping[Path, str], skip_bad: bool, folder: Path
) -> None:
    """Create or replace the views in ``database``.

    Args:
        database: receives the views.
        runs: the name of each run directory.
        skip_bad: whether to leave out damaged records, each with one line on stderr.
        folder: where the records stay readable until the database is closed.

    Raises:
        UsageError: a record is damaged, and ``skip_bad`` is false.
    """
    rows: list[dict[str, Any]] = []
    groups: list[tuple[str, Layout, list[Path]]] = []
    for record in VerifiedRecords(list(runs), skip_bad):
        name, layout = runs[record.run], record.header.layout
        rows.append(_row(name, record.path, len(record.content), record.header))
        if not groups or groups[-1][:2] != (name, layout):
            groups.append((name, layout, []))
        groups[-1][2].append(_lasting_path(record, folder / f"record-{len(rows)}.parquet"))
    parts = []
    for number, (name, layout, paths) in enumerate(groups):
        database.register(f"records_{number}", _dataset(paths, layout))
        parts.append(_selection(f"records_{number}", name, layout))
    if not parts:
        database.register("records_0", record_schema(_NO_LAYOUT).empty_table())
        parts.append(_selection("records_0", "", _NO_LAYOUT))
    database.execute(f"CREATE OR REPLACE VIEW records AS {' UNION ALL '.join(parts)}")
    database.register("files_of_records", pyarrow.Table.from_pylist(rows, _FILES))
    database.execute("CREATE OR REPLACE VIEW record_files AS SELECT * FROM files_of_records")


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


def _row(name: str, path: Path, size: int, header: RecordHeader) -> dict[str, Any]:
    layout = header.layout
    return {
        "run": name,
        "round": header.round,
        "policy": header.policy,
        "episodes": header.episodes,
        "steps": header.steps,
        "bytes": size,
        "draws": list(header.tasks),
        "host_features": layout.host,
        "slot_features": layout.slots,
        "critic_features": layout.critic,
        "heads": layout.heads,
        "ops": layout.options["op"],
        "blueprints": layout.options["blueprint"],
        "format": header.format,
        "esper": header.esper,
        "path": str(path),
    }


def _dataset(paths: Iterable[Path], layout: Layout) -> pyarrow.dataset.Dataset:
    """The files as one table, of which only the columns that a query needs are read."""
    return pyarrow.dataset.dataset(
        [str(path) for path in paths],
        schema=record_schema(layout),
        format="parquet",
        filesystem=pyarrow.fs.LocalFileSystem(),
    )


def _selection(table: str, run: str, layout: Layout) -> str:
    casts = ", ".join(f"{name}::{kind} AS {name}" for name, kind in _LISTS.items())
    ops = ", ".join(sql_literal(op) for op in layout.options["op"])
    return (
        f"SELECT {sql_literal(run)} AS run, * REPLACE ({casts}), "
        f"[{ops}][actions[1] + 1] AS op FROM {table}"
    )
