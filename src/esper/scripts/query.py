"""``esper query``: SQL over the events and records of runs."""

import csv
import io
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.karn.queries import Store
from esper.leyline.config.setting import setting
from esper.leyline.errors import UsageError
from esper.leyline.events import EVENTS, number
from esper.leyline.notices import notice
from esper.scripts.flags import parse

Form = Literal["table", "csv", "json", "parquet"]
UNLIMITED = 1_000_000
"""Width at which no table is cut, in characters."""
MOST_ROWS = 1_000
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
    with Store([Path(run) for run in runs], settings.skip_bad) as store:
        table = store.query(sql)
    if settings.output is None:
        _print(table, settings.format)
        return 0
    try:
        _write(table, settings.format, settings.output)
    except (OSError, pyarrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"output: cannot write to {settings.output} ({reason}); name another file"
        ) from error
    return 0


def _views() -> str:
    """The views with their columns, and the tables of events, as help text."""
    with Store([]) as store:
        columns = store.columns()
    lines = ["views and their columns:"]
    for view, own in columns.items():
        lines += ["", f"  {view}"]
        lines += [f"    {name:<32}{kind}" for name, kind in own]
    lines += ["", "and one table per kind of event, with the columns in docs/events.md:", ""]
    return "\n".join([*lines, *(f"  {name.lower()}" for name in EVENTS)])


def _print(table: pyarrow.Table, form: Form) -> None:
    if form == "table":
        _show(Console(), table)
        if table.num_rows > MOST_ROWS:
            left = table.num_rows - MOST_ROWS
            notice(f"{left} more rows; --format csv writes all of them")
        return
    sys.stdout.write(_text(table, form))


def _write(table: pyarrow.Table, form: Form, target: Path) -> None:
    if form == "parquet":
        with target.open("wb") as file:
            pyarrow.parquet.write_table(table, file)
    elif form == "table":
        with target.open("w", encoding="utf-8") as text:
            _show(Console(file=text, width=1_000), table)
    else:
        target.write_text(_text(table, form), encoding="utf-8")


def _text(table: pyarrow.Table, form: Form) -> str:
    """The result as CSV, where an empty cell is a missing value, or as a JSON list of rows."""
    rows = table.to_pylist()
    if form == "json":
        return json.dumps([_plain(row) for row in rows], default=str, indent=1) + "\n"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.column_names)
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return text.getvalue()


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


def _show(console: Console, table: pyarrow.Table) -> None:
    """Print a table; one that is wider than the console as records, a line for each value."""
    shown = _shown(table)
    unlimited = console.options.update(max_width=UNLIMITED)
    if console.measure(shown, options=unlimited).maximum <= console.width:
        console.print(shown)
        return
    names = Table.grid(padding=(0, 2))
    names.add_column(no_wrap=True)
    names.add_column(overflow="fold")
    for place, row in enumerate(table.slice(0, MOST_ROWS).to_pylist(), 1):
        names.add_row(Text(f"── row {place}", style="bold"), "")
        for name, value in row.items():
            names.add_row(Text(name), Text(_readable(value)))
    console.print(names)


def _shown(table: pyarrow.Table) -> Table:
    shown = Table()
    for field in table.schema:
        right = pyarrow.types.is_integer(field.type) or pyarrow.types.is_floating(field.type)
        shown.add_column(Text(field.name), justify="right" if right else "left", overflow="fold")
    for row in table.slice(0, MOST_ROWS).to_pylist():
        shown.add_row(*(Text(_readable(value)) for value in row.values()))
    return shown


def _readable(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(number(value))
    if isinstance(value, list):
        return " ".join(_readable(item) for item in value)
    return str(value)
