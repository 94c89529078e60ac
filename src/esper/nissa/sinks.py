"""The protocol of a sink, and the sinks of a run."""

from pathlib import Path
from typing import BinaryIO, Protocol

from esper.leyline.config import OutputConfig
from esper.leyline.events import Event, encode
from esper.nissa.parquet import write_parquet
from esper.nissa.trackers import TensorBoard, WandB, require_library


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
    """Appends events to a file, one JSON line per event.

    The file is opened for the first event, so that one that cannot be opened does not end a run.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, event: Event) -> None:
        """Append the event's JSON line."""
        if self._file is None:
            self._file = self._path.open("ab")
        self._file.write(encode(event) + b"\n")

    def flush(self) -> None:
        """Hand buffered lines to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write buffered lines and close the file."""
        if self._file is not None:
            self._file.close()


class ParquetAtEnd:
    """When the run ends, converts the lines of another sink to a Parquet file.

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
        """Write ``events.parquet`` from the lines of the run."""
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
    sinks: list[Sink] = [JsonLines(run / "events.jsonl"), ParquetAtEnd(run)]
    if output.tensorboard:
        sinks.append(TensorBoard(run / "tensorboard"))
    if output.wandb:
        sinks.append(WandB(run))
    return sinks
