"""Moves the lines of a run to compressed Parquet files while it runs, and when it ends."""

import os
from pathlib import Path

from esper.leyline.events.part_writer import chunks, write_lines, write_part
from esper.leyline.events.parts import FOLDER, parts_of, superseded_parts


def write_parquet(run: Path, target: Path) -> None:
    """Write the lines of a run's ``events.jsonl`` to ``target``.

    Raises:
        OSError: a file cannot be read or written.
    """
    with (run / "events.jsonl").open("rb") as file:
        write_lines((line for line in file if line.endswith(b"\n")), target)


def rotate(run: Path, size: int) -> None:
    """Move the lines of ``events.jsonl`` to parts of about ``size`` bytes.

    A reader finds every line exactly once at any moment, and after a crash as well, see
    ``leyline.events.parts``.

    Raises:
        OSError: the disk failed or is full; ``events.jsonl`` is as before.
    """
    events, draft = run / "events.jsonl", run / "events.draft"
    with events.open("rb") as file:
        for part in superseded_parts(run, file):
            part.path.unlink()
        parts = parts_of(run, file)
        start = parts[-1].end if parts else 0
        file.seek(0)
        for chunk in chunks(file, size):
            write_part(run, start, chunk)
            start += sum(map(len, chunk))
    _sync(run / FOLDER)
    # Its lines are in the parts from now on.
    (run / "events.parquet").unlink(missing_ok=True)
    try:
        draft.touch()
        draft.replace(events)
    finally:
        draft.unlink(missing_ok=True)
    _sync(run)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
