"""Where events go: the protocol of a sink, and the sinks that a run asks for."""

from pathlib import Path
from typing import Protocol

from esper.leyline.config import OutputConfig
from esper.leyline.events import Event, encode
from esper.nissa.parquet import write_parquet
from esper.nissa.trackers import TensorBoard, WandB, require_library


class Sink(Protocol):
    """Somewhere events go. Any method may raise: the hub then goes on without the sink."""

    def write(self, event: Event) -> None:
        """Take one event."""
        ...

    def flush(self) -> None:
        """Make sure that what was taken is kept."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class JsonLines:
    """Appends events to a file, one line each."""

    def __init__(self, path: Path):
        self._file = path.open("ab")

    def write(self, event: Event) -> None:
        """Append the event's JSON line."""
        self._file.write(encode(event) + b"\n")

    def flush(self) -> None:
        """Hand buffered lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Write buffered lines and close the file."""
        self._file.close()


class ParquetAtEnd:
    """Turns the lines that another sink wrote into a Parquet file when the run ends.

    Args:
        run: holds the lines; what writes them stands before this sink.
    """

    def __init__(self, run: Path):
        self._run = run

    def write(self, event: Event) -> None:
        """The lines are read at the end."""

    def flush(self) -> None:
        """The lines are read at the end."""

    def close(self) -> None:
        """Write ``events.parquet`` from the lines of the run."""
        write_parquet(self._run, self._run / "events.parquet")


def check_sinks(output: OutputConfig) -> None:
    """Refuse sinks that cannot work, before anything is written.

    Raises:
        UsageError: a library is missing, or the level leaves a tracker nothing to track.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(output, name):
            require_library(name, output.telemetry_level)


def run_sinks(run: Path, output: OutputConfig) -> list[Sink]:
    """The sinks of a run directory, none where nothing shall be written."""
    if output.telemetry_level == "off":
        return []
    sinks: list[Sink] = [JsonLines(run / "events.jsonl"), ParquetAtEnd(run)]
    if output.tensorboard:
        sinks.append(TensorBoard(run / "tensorboard"))
    if output.wandb:
        sinks.append(WandB(run))
    return sinks
