"""The protocol of a sink, and the sinks of a run."""

import os
from pathlib import Path
from typing import BinaryIO, Protocol

from esper.leyline.config import OutputConfig
from esper.leyline.events import Event, encode
from esper.leyline.events.parts import (
    FOLDER,
    chunks,
    parts_of,
    superseded_parts,
    write_lines,
    write_part,
)
from esper.leyline.notices import notice
from esper.nissa.trackers import TensorBoard, WandB, require_library

PART_BYTES = OutputConfig().events_megabytes * 2**20
"""Bytes of lines per part, unless the settings say otherwise."""


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


class Sink(Protocol):
    """A destination of events. If a method raises, the hub continues without the sink."""

    def write(self, event: Event) -> None:
        """Write one event."""
        ...

    def flush(self) -> None:
        """Pass on all buffered events."""
        ...

    def close(self) -> None:
        """Finish; no event will follow."""
        ...


class JsonLines:
    """Appends events to ``events.jsonl``, one JSON line per event.

    The file is opened for the first event, so that one that cannot be opened does not end a run.

    Args:
        run: the run directory.
        part_bytes: once the file is as large, its lines move to a compressed file, see
            ``leyline.events.parts``.
    """

    def __init__(self, run: Path, part_bytes: int = PART_BYTES):
        self._run, self._part_bytes, self._limit = run, part_bytes, part_bytes
        self._file: BinaryIO | None = None

    def write(self, event: Event) -> None:
        """Append the event's JSON line."""
        if self._file is None:
            self._file = (self._run / "events.jsonl").open("ab")
        self._file.write(encode(event) + b"\n")
        if self._file.tell() >= self._limit:
            self._file.close()
            self._file = None
            self._rotate()

    def _rotate(self) -> None:
        try:
            rotate(self._run, self._part_bytes)
            self._limit = self._part_bytes
        except OSError as error:
            # The lines stay where they are; there may be room when as many have come again.
            self._limit += self._part_bytes
            notice(
                f"warning: telemetry: {self._run / 'events.jsonl'} was not compressed "
                f"({error.strerror or error}); its events are kept"
            )

    def flush(self) -> None:
        """Hand buffered lines to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write buffered lines and close the file."""
        if self._file is not None:
            self._file.close()


class ParquetAtEnd:
    """When the run ends, converts the lines in ``events.jsonl`` to a Parquet file.

    Args:
        run: the run directory; the sink that writes its lines must come before this one.
    """

    def __init__(self, run: Path):
        self._run = run

    def write(self, event: Event) -> None:
        """Do nothing: ``close`` reads the lines."""

    def flush(self) -> None:
        """Do nothing: ``close`` reads the lines."""

    def close(self) -> None:
        """Write ``events.parquet``."""
        write_parquet(self._run, self._run / "events.parquet")


def check_sinks(output: OutputConfig) -> None:
    """Check that the sinks can work, before anything is written.

    Raises:
        UsageError: a library is missing, or the telemetry level writes no events to track.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(output, name):
            require_library(name, output.telemetry_level)


def run_sinks(run: Path, output: OutputConfig) -> list[Sink]:
    """Return the sinks of a run directory; none at telemetry level ``off``."""
    if output.telemetry_level == "off":
        return []
    sinks: list[Sink] = [JsonLines(run, output.events_megabytes * 2**20), ParquetAtEnd(run)]
    if output.tensorboard:
        sinks.append(TensorBoard(run / "tensorboard"))
    if output.wandb:
        sinks.append(WandB(run))
    return sinks
