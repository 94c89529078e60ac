"""Someone who watches a run while it goes on."""

from pathlib import Path
from typing import Protocol

from esper.leyline.config import TrainConfig
from esper.simic.training.gym_trainee import GymSummary
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.trainee import AnyStep

AnySummary = RoundSummary | GymSummary


class Observer(Protocol):
    """Someone who watches a run."""

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """Training begins, ``done`` rounds having been trained before."""
        ...

    def stepped(self, step: AnyStep) -> None:
        """An environment step is done."""
        ...

    def round_done(self, summary: AnySummary) -> None:
        """A round is done and safe."""
        ...


class Unobserved:
    """Nobody watches."""

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """See ``Observer``."""

    def stepped(self, step: AnyStep) -> None:
        """See ``Observer``."""

    def round_done(self, summary: AnySummary) -> None:
        """See ``Observer``."""
