"""Sinks for third-party trackers: metrics of rounds and updates as scalars over rounds."""

import importlib.util
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.leyline.errors import UsageError
from esper.leyline.events import (
    AnalyticsSnapshot,
    AnomalyDetected,
    EpisodeOutcome,
    Event,
    GrowthEpochCompleted,
    GrowthStarted,
    PPOUpdateCompleted,
    TrainingStarted,
    to_floats,
)

_OUTCOMES = tuple(
    name for name in EpisodeOutcome.__struct_fields__ if name not in ("time", "round", "task")
) + ("gain", "validation_gain")
_SPEEDS = ("environment_steps_per_second", "rollout_seconds", "update_seconds")


def require_library(name: str, level: str) -> None:
    """Check that the tracker ``name`` can work.

    Raises:
        UsageError: its library is missing, or ``level`` writes no events.
    """
    if level == "off":
        raise UsageError(f"{name}: telemetry_level off writes no events; choose another level")
    if importlib.util.find_spec(name) is None:
        raise UsageError(
            f"{name}: the library is not installed; pip install 'esper-growth[trackers]'"
        )


def scalars(event: Event) -> dict[str, float]:
    """Return the scalars of an event by name; values per environment are averaged."""
    if isinstance(event, PPOUpdateCompleted):
        metrics = {name: value for name, value in event.metrics.items() if value is not None}
        return {f"update/{name}": float(value) for name, value in metrics.items()}
    if isinstance(event, AnalyticsSnapshot):
        return {f"speed/{name}": getattr(event, name) for name in _SPEEDS}
    if isinstance(event, EpisodeOutcome):
        lists = {name: to_floats(getattr(event, name)) for name in _OUTCOMES}
        return {f"episodes/{name}": fmean(values) for name, values in lists.items() if values}
    if isinstance(event, GrowthEpochCompleted):
        prefix = event.variant + (f"-{event.attempt}" if event.attempt > 1 else "")
        figures = {
            event.unit: event.figure,
            "validation_loss": event.loss,
            "training_loss": event.train_loss,
        }
        numbers = {name: float(value) for name, value in figures.items() if value is not None}
        numbers["parameters"] = event.parameters
        return {f"{prefix}/{name}": value for name, value in numbers.items()}
    return {}


def position(event: Event) -> int:
    """Where an event lies on the axis of a tracker: its round, or its epoch of growth."""
    number: int = getattr(event, "epoch" if isinstance(event, GrowthEpochCompleted) else "round", 0)
    return number


class TensorBoard:
    """Writes TensorBoard event files.

    Args:
        folder: directory of the files, for ``tensorboard --logdir``.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None

    def write(self, event: Event) -> None:
        """Write the event's scalars at its round, and an anomaly as text.

        The first event, ``TrainingStarted`` or ``GrowthStarted``, opens the files.
        """
        if isinstance(event, TrainingStarted | GrowthStarted):
            from torch.utils.tensorboard import SummaryWriter

            # The scalars of rounds that a resumed run repeats replace the earlier ones.
            later = event.round + 1 if isinstance(event, TrainingStarted) else None
            self._writer = SummaryWriter(str(self._folder), purge_step=later)
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, position(event))
        if isinstance(event, AnomalyDetected):
            self._writer.add_text(f"anomaly/{event.kind}", event.message, event.round)

    def flush(self) -> None:
        """Write buffered scalars to the files."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write buffered scalars and close the files."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Writes a Weights & Biases run offline; ``wandb sync`` uploads it.

    Args:
        run: the run directory; the files are in its folder ``wandb``.
    """

    def __init__(self, run: Path):
        self._path = run
        self._run: Any = None

    def write(self, event: Event) -> None:
        """Log the event's scalars with its round, and the message of an anomaly.

        The first event, ``TrainingStarted`` or ``GrowthStarted``, opens the wandb run.
        """
        if isinstance(event, TrainingStarted | GrowthStarted):
            import wandb

            names = ("tasks", "policy", "envs", "model", "epochs", "price")
            self._run = wandb.init(
                project="esper",
                name=self._path.name,
                dir=str(self._path),
                mode="offline",
                config={name: getattr(event, name) for name in names if hasattr(event, name)},
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, save_code=False
                ),
            )
        values: dict[str, float | str] = dict(scalars(event))
        if isinstance(event, AnomalyDetected):
            values[f"anomaly/{event.kind}"] = event.message
        if values:
            axis = "epoch" if isinstance(event, GrowthEpochCompleted) else "round"
            self._run.log({axis: position(event), **values})

    def flush(self) -> None:
        """Nothing to do: wandb's own process writes."""

    def close(self) -> None:
        """Finish the wandb run, so that ``wandb sync`` can upload it."""
        if self._run is not None:
            self._run.finish()
