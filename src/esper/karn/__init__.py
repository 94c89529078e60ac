"""Karn reads telemetry: it reads run directories and never takes part in training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow


def query(
    runs: Path | str | Sequence[Path | str], sql: str, skip_bad: bool = False
) -> pyarrow.Table:
    """Run ``sql`` on some runs, live or ended; return an Arrow table (it has ``to_pandas()``).

    Args:
        runs: run directories, or directories that contain some at any depth.
        sql: one SELECT over the views of ``karn.views`` and ``karn.record_views``.
        skip_bad: whether to leave out damaged records, each with one line on stderr.

    Raises:
        UsageError: there is no run, the SQL is invalid, or a record that it reads is damaged.
    """
    # Imported here, so that code that only reads events does not load the database.
    from esper.karn.queries import Store

    paths = [runs] if isinstance(runs, Path | str) else runs
    with Store([Path(path) for path in paths], skip_bad) as store:
        return store.query(sql)
