"""What the training loop trains: environments and the policy that acts in them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from esper.leyline.config import TrainConfig
from esper.leyline.events import SCHEMA_VERSION, TrainingStarted
from esper.nissa.hub import Hub
from esper.simic.growth.step import Step
from esper.simic.gym.collect import GymStep
from esper.simic.ppo import PPOAgent
from esper.simic.records.record_writer import RoundContent
from esper.simic.rollout import Rollout
from esper.simic.run.checkpoint import restore_agent
from esper.simic.training.run_lines import schedule_settings
from esper.tolaria.precision import Precision

AnyStep = Step | GymStep


class Trainee(ABC):
    """Environments and the policy that acts in them.

    Attributes:
        config: resolved settings.
        policy: what events call the policy.
        agent: the learner, None for a policy that does not learn.
        backend_name: backend of the environments.
        precision: precision of the environments' arithmetic.
        operation_threads: CPU threads per operation.
        best: whether the last round is the best that was evaluated, and its policy is kept.
        at_goal: whether the last round reached the return at which the run ends.
    """

    config: TrainConfig
    policy: str
    agent: PPOAgent[Any] | None
    backend_name: str
    precision: Precision
    operation_threads: int = 1
    best: bool = False
    at_goal: bool = False

    @property
    def data_digests(self) -> dict[str, str]:
        """SHA-256 of the data by name of task or family; empty where they are not known."""
        return {}

    @property
    def count(self) -> int:
        """Number of environments."""
        return self.config.world.envs

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of each environment per round."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """The fields of ``TrainingStarted`` that say what the environments are."""

    def start_event(self, done: int) -> TrainingStarted:
        """The event of a process that begins after ``done`` rounds."""
        return TrainingStarted(
            time=time.time(),
            schema=SCHEMA_VERSION,
            round=done,
            rounds=self.config.world.rounds,
            policy=self.policy,
            envs=self.count,
            episode_length=self.steps,
            amp_enabled=self.precision.enabled,
            amp_dtype=self.precision.dtype_name,
            level=self.config.output.telemetry_level,
            amp_policy_dtype=None if self.agent is None else self.agent.policy.amp_dtype_name,
            schedules={} if self.agent is None else schedule_settings(self.config.learner),
            **self.description(),
        )

    def amp_scale(self) -> float | None:
        """The smallest loss scale of the environments, None if losses are not scaled."""
        return None

    @abstractmethod
    def collect(self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]) -> Rollout[Any]:
        """Act for one round and emit its events; ``on_step`` may raise to end the round early."""

    @abstractmethod
    def record(self, number: int, rollout: Rollout[Any]) -> RoundContent:
        """The rollout of a round for a file, before its update."""

    def known_values(self, rollout: Rollout[Any]) -> Tensor | None:
        """The critic's estimates in units of reward, ``[T, N]``; None without a critic."""
        agent = self.agent
        if agent is None or agent.actor is not agent or rollout.lag:
            # The moments of an older policy's values are not known any more.
            return None
        return agent.return_moments.restore(rollout.values)

    @abstractmethod
    def finish(
        self, hub: Hub, number: int, steps_per_second: float, metrics: dict[str, float | None]
    ) -> Any:
        """Emit and return the outcome of a round, after its update.

        It has at least the attributes ``round``, ``steps_per_second`` (including the update) and
        ``metrics`` (of the update, by name; empty without an update).
        """

    @abstractmethod
    def environment_parts(self) -> dict[str, dict[str, Any]]:
        """The state of the environments for a checkpoint, as of the end of the last round."""

    @abstractmethod
    def restore_environments(self, parts: dict[str, dict[str, Any]]) -> None:
        """Restore what ``environment_parts`` returned, after the learner.

        Raises:
            UsageError: the parts belong to another task.
        """

    def parts(self) -> dict[str, dict[str, Any]]:
        """The state for a checkpoint, by part, as of the end of the last round."""
        assert self.agent is not None, "only a learned policy is saved"
        return self.agent.state() | self.environment_parts()

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """Restore what ``parts`` returned.

        Raises:
            UsageError: the parts belong to another network or task.
        """
        assert self.agent is not None, "only a learned policy is resumed"
        restore_agent(self.agent, parts)
        self.restore_environments(parts)

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the environments."""
