"""Write the events of a finished run to one Parquet file, for column-oriented tools."""

from pathlib import Path

import pyarrow
import pyarrow.parquet

from esper.leyline.events import event_type
from esper.leyline.events.reader import EventReader

SCHEMA = pyarrow.schema(
    [
        ("event_type", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
        ("time", pyarrow.float64()),
        ("round", pyarrow.int64()),
        ("step", pyarrow.int64()),
        ("data", pyarrow.string()),
    ]
)
"""``data`` is the event's JSON line; the other columns are for filtering."""


def write_parquet(run: Path, target: Path) -> None:
    """Write the events of ``run`` to ``target``; unreadable lines are skipped."""
    columns: dict[str, list[object]] = {field.name: [] for field in SCHEMA}
    for line, event in EventReader(run):
        columns["event_type"].append(event_type(type(event)))
        for name in ("time", "round", "step"):
            columns[name].append(getattr(event, name, None))
        columns["data"].append(line.decode().rstrip("\n"))
    draft = target.with_suffix(".draft")
    with draft.open("wb") as file:
        # Not a path: pyarrow would take one such as "s3:/x" for a remote address.
        pyarrow.parquet.write_table(pyarrow.table(columns, schema=SCHEMA), file)
    draft.rename(target)
