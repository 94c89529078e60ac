"""``esper query``: SQL over the events and records of runs."""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.karn.queries import Store
from esper.leyline.config.setting import setting
from esper.leyline.disk import sync
from esper.leyline.errors import UsageError
from esper.leyline.events import EVENTS, number
from esper.leyline.notices import notice
from esper.leyline.phases import phase
from esper.scripts.flags import parse

Form = Literal["table", "csv", "json", "parquet"]
MAX_WIDTH = 1_000_000
"""Width at which no table is cut, in characters."""
MAX_ROWS = 1_000
"""Maximum number of rows in a table; the other formats write all rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryArguments:
    """Query what running or ended runs have written with SQL: esper query RUN... "SELECT ..."."""

    runs: tuple[str, ...] = setting((), positional=True)
    """Run directories, or directories that contain some, followed by the SQL: one SELECT."""
    format: Form = "table"
    """Format of the result: a table to read, or csv, json or parquet."""
    output: Path | None = setting(None, aliases=("o",))
    """File to write to instead of the terminal; required for parquet."""
    skip_bad: bool = False
    """Leave out damaged records, each with a warning, instead of refusing the query."""


def query(arguments: list[str]) -> int:
    """Query the events and records of runs with SQL."""
    program = "esper query"
    try:
        settings = parse(QueryArguments, program, arguments)
    except SystemExit:
        print(_views())
        raise
    *runs, sql = settings.runs or [""]
    if not runs:
        raise UsageError(f'{program}: needs runs and SQL: {program} RUN "SELECT * FROM updates"')
    if settings.format == "parquet" and settings.output is None:
        raise UsageError("output: parquet is not text; name a file with -o")
    with (
        Store([Path(run) for run in runs], settings.skip_bad) as store,
        phase("querying"),
        store.batches(sql) as batches,
    ):
        if settings.output is None:
            _write_text(batches, settings.format, sys.stdout)
            return 0
        try:
            with _replacement(settings.output) as draft:
                if settings.format == "parquet":
                    _write_parquet(batches, draft)
                else:
                    with draft.open("w", encoding="utf-8") as text:
                        _write_text(batches, settings.format, text, width=1_000)
        except OSError as error:
            raise UsageError(
                f"output: cannot write to {settings.output} ({error.strerror or error}); name "
                "another file"
            ) from error
    return 0


@contextmanager
def _replacement(target: Path) -> Iterator[Path]:
    """A file to write that becomes ``target`` once it is whole.

    A pipe, a device and a file in a folder that takes no other are written as they are.
    """
    replaceable = target.is_file() and os.access(target.resolve().parent, os.W_OK)
    if target.exists() and not replaceable:
        yield target
        return
    target = target.resolve()
    draft = target.with_name(f"{target.name}.draft")
    try:
        yield draft
        if target.exists():
            draft.chmod(target.stat().st_mode)
        sync(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _views() -> str:
    """The views with their columns, and the tables of events, as help text."""
    with Store([]) as store:
        columns = store.columns()
    lines = ["views and their columns:"]
    for view, fields in columns.items():
        lines += ["", f"  {view}"]
        lines += [f"    {name:<31} {kind}" for name, kind in fields]
    lines += ["", "and one table per kind of event, with the columns in docs/events.md:", ""]
    return "\n".join([*lines, *(f"  {name.lower()}" for name in EVENTS)])


def _write_parquet(batches: pyarrow.RecordBatchReader, target: Path) -> None:
    with target.open("wb") as file, pyarrow.parquet.ParquetWriter(file, batches.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _write_text(
    batches: pyarrow.RecordBatchReader, form: Form, text: TextIO, width: int | None = None
) -> None:
    """Write a table, CSV, where an empty cell is a missing value, or a JSON list of rows."""
    if form != "table":
        text.writelines(_json(batches) if form == "json" else _csv(batches))
        return
    remaining = _show(Console(file=text, width=width), batches)
    if remaining:
        notice(f"{remaining} more rows; --format csv writes all of them")


def _json(batches: pyarrow.RecordBatchReader) -> Iterator[str]:
    before = "[\n "
    for batch in batches:
        for row in batch.to_pylist():
            yield before + json.dumps(_plain(row), default=str, indent=1).replace("\n", "\n ")
            before = ",\n "
    yield "[]\n" if before.startswith("[") else "\n]\n"


def _csv(batches: pyarrow.RecordBatchReader) -> Iterator[str]:
    def lines(rows: Iterable[Iterable[Any]]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()

    yield lines([batches.schema.names])
    for batch in batches:
        yield lines([_cell(value) for value in row.values()] for row in batch.to_pylist())


def _plain(value: Any) -> Any:
    """A value that JSON can represent; non-finite numbers are written as events write them."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _cell(value: Any) -> Any:
    plain = _plain(value)
    return json.dumps(plain, default=str) if isinstance(plain, list | dict) else plain


def _show(console: Console, batches: pyarrow.RecordBatchReader) -> int:
    """Print the first ``MAX_ROWS`` rows; return the number of rows that are left out.

    A table that is wider than the console is printed as records, a line for each value.
    """
    rows, count = [], 0
    for batch in batches:
        rows += batch.slice(0, max(0, MAX_ROWS - count)).to_pylist()
        count += batch.num_rows
    remaining = max(0, count - MAX_ROWS)
    table = _table(batches.schema, rows)
    options = console.options.update(max_width=MAX_WIDTH)
    if console.measure(table, options=options).maximum <= console.width:
        console.print(table)
        return remaining
    names = Table.grid(padding=(0, 2))
    names.add_column(no_wrap=True)
    names.add_column(overflow="fold")
    for index, row in enumerate(rows, 1):
        names.add_row(Text(f"── row {index}", style="bold"), "")
        for name, value in row.items():
            names.add_row(Text(name), Text(_readable(value)))
    console.print(names)
    return remaining


def _table(schema: pyarrow.Schema, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    for field in schema:
        right = pyarrow.types.is_integer(field.type) or pyarrow.types.is_floating(field.type)
        table.add_column(Text(field.name), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_readable(value)) for value in row.values()))
    return table


def _readable(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(number(value))
    if isinstance(value, list):
        return " ".join(_readable(item) for item in value)
    return str(value)
