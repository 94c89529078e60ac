"""The events of a finished run as one Parquet file, for tools that read columns."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

SCHEMA = pyarrow.schema(
    [
        ("event_type", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
        ("time", pyarrow.float64()),
        ("round", pyarrow.int64()),
        ("step", pyarrow.int64()),
        ("data", pyarrow.string()),
    ]
)
"""``data`` is the event's JSON line; the other columns are what one filters by."""


def write_parquet(events: Path, target: Path) -> None:
    """Write the lines of ``events`` to ``target``; a line that cannot be read is left out."""
    columns: dict[str, list[object]] = {field.name: [] for field in SCHEMA}
    with events.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if not isinstance(content, dict):
                continue
            for name in columns:
                columns[name].append(line.rstrip("\n") if name == "data" else content.get(name))
    draft = target.with_suffix(".draft")
    with draft.open("wb") as file:
        # Given a path, pyarrow would read a name such as "s3:/x" as an address.
        pyarrow.parquet.write_table(pyarrow.table(columns, schema=SCHEMA), file)
    draft.rename(target)
