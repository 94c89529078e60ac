"""What a run trains, for the training loop."""

from collections.abc import Callable
from typing import Any, Protocol

from esper.leyline.config import TrainConfig
from esper.leyline.events import TrainingStarted
from esper.nissa.hub import Hub
from esper.simic.growth.step import Step
from esper.simic.gym.collect import GymStep
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tolaria.precision import Precision

AnyStep = Step | GymStep


class Summary(Protocol):
    """What came of a round."""

    @property
    def round(self) -> int: ...
    @property
    def steps_per_second(self) -> float: ...
    @property
    def metrics(self) -> dict[str, float | None]: ...


class Trainee(Protocol):
    """Environments, and who acts in them.

    Attributes:
        config: settings as resolved.
        precision: of the environments' arithmetic.
        backend_name: what computes the environments.
        steps: of each environment in a round.
        count: environments.
        operation_threads: CPU threads of a single operation.
    """

    config: TrainConfig
    precision: Precision
    backend_name: str
    steps: int
    count: int
    operation_threads: int

    @property
    def agent(self) -> PPOAgent[Any] | None:
        """Who learns, None where nobody does."""
        ...

    def started(self, time: float, done: int) -> TrainingStarted:
        """The event of its start, ``done`` rounds having been trained before."""
        ...

    def amp_scale(self) -> float | None:
        """The least loss scale of the environments, None where losses are not scaled."""
        ...

    def collect(self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]) -> Rollout[Any]:
        """Act for one round, events to the hub; ``on_step`` may raise to end it early."""
        ...

    def finish(
        self, hub: Hub, number: int, steps_per_second: float, metrics: dict[str, float | None]
    ) -> Summary:
        """The round is over and learned: emit its outcome."""
        ...

    def parts(self) -> dict[str, dict[str, Any]]:
        """Everything there is to remember, as it was when the last round was over."""
        ...

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """Take back what ``parts`` gave.

        Raises:
            UsageError: it belongs to something else.
        """
        ...

    def close(self) -> None:
        """Release its resources."""
        ...
