"""The interface between the training loop and what a run trains."""

from collections.abc import Callable
from typing import Any, Protocol

from esper.leyline.config import TrainConfig
from esper.leyline.events import TrainingStarted
from esper.nissa.hub import Hub
from esper.simic.growth.step import Step
from esper.simic.gym.collect import GymStep
from esper.simic.ppo import PPOAgent
from esper.simic.records.record_columns import RoundRecord
from esper.simic.rollout import Rollout
from esper.tolaria.precision import Precision

AnyStep = Step | GymStep


class Summary(Protocol):
    """Outcome of a round."""

    @property
    def round(self) -> int:
        """Number of the round, from 1."""
        ...

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second, including the update."""
        ...

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the update by name; empty without an update."""
        ...


class Trainee(Protocol):
    """Environments and the policy that acts in them.

    Attributes:
        config: resolved settings.
        backend_name: backend of the environments.
    """

    config: TrainConfig
    backend_name: str

    @property
    def precision(self) -> Precision:
        """Precision of the environments' arithmetic."""
        ...

    @property
    def steps(self) -> int:
        """Steps of each environment per round."""
        ...

    @property
    def count(self) -> int:
        """Number of environments."""
        ...

    @property
    def operation_threads(self) -> int:
        """CPU threads per operation."""
        ...

    @property
    def data_digests(self) -> dict[str, str]:
        """SHA-256 of the data by name of task or family; empty where they are not known."""
        ...

    @property
    def agent(self) -> PPOAgent[Any] | None:
        """The learner, None for a policy that does not learn."""
        ...

    def start_event(self, time: float, done: int) -> TrainingStarted:
        """The event ``TrainingStarted``; earlier processes completed ``done`` rounds."""
        ...

    def amp_scale(self) -> float | None:
        """The smallest loss scale of the environments, None if losses are not scaled."""
        ...

    def collect(self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]) -> Rollout[Any]:
        """Act for one round and emit its events; ``on_step`` may raise to end the round early."""
        ...

    def record(self, number: int, rollout: Rollout[Any]) -> RoundRecord | None:
        """The rollout of a round for a file, before its update; None for a Gymnasium task."""
        ...

    def finish(
        self, hub: Hub, number: int, steps_per_second: float, metrics: dict[str, float | None]
    ) -> Summary:
        """Emit and return the outcome of a round, after its update."""
        ...

    def parts(self) -> dict[str, dict[str, Any]]:
        """The state for a checkpoint, by part, as of the end of the last round."""
        ...

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """Restore what ``parts`` returned.

        Raises:
            UsageError: the parts belong to another network or task.
        """
        ...

    def close(self) -> None:
        """Release the resources of the environments."""
        ...
