"""Karn takes telemetry in: it reads run directories, and never takes part in training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow


def query(runs: Path | str | Sequence[Path | str], sql: str) -> pyarrow.Table:
    """What ``sql`` says of some runs, live or ended, as an Arrow table (``to_pandas()`` by it).

    Args:
        runs: run directories, or directories that hold some at any depth.
        sql: one SELECT over the views of ``karn.views``.

    Raises:
        UsageError: there is no run, or the SQL is at fault.
    """
    # Who only reads events does not wait for the database to load.
    from esper.karn.queries import Store

    several = [runs] if isinstance(runs, Path | str) else runs
    with Store([Path(run) for run in several]) as store:
        return store.query(sql)
