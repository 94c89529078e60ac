"""The interface of objects that are notified of a run's progress."""

from pathlib import Path
from typing import Protocol

from esper.leyline.config import TrainConfig
from esper.simic.training.gym_trainee import GymSummary
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.trainee import AnyStep

AnySummary = RoundSummary | GymSummary


class Observer(Protocol):
    """Receives notifications of a run's progress."""

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """Called when training begins; earlier processes completed ``done`` rounds."""
        ...

    def stepped(self, step: AnyStep) -> None:
        """Called after every environment step."""
        ...

    def round_done(self, summary: AnySummary) -> None:
        """Called after every round, after its checkpoint if one is due."""
        ...


class Unobserved:
    """An observer that does nothing."""

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """See ``Observer``."""

    def stepped(self, step: AnyStep) -> None:
        """See ``Observer``."""

    def round_done(self, summary: AnySummary) -> None:
        """See ``Observer``."""
