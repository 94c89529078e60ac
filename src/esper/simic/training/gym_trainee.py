"""The trainee of a Gymnasium task: environments and their learner."""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from esper.leyline.config import TrainConfig, shown, unflatten
from esper.leyline.errors import UsageError, first_line
from esper.leyline.events import SCHEMA_VERSION, GymEpisodes, TrainingStarted, numbers
from esper.nissa.hub import Hub
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.collect import GymStep, collect
from esper.simic.gym.memory_tasks import register
from esper.simic.gym.vector_environment import Episode, GymEnvironments, Shape, make
from esper.simic.ppo import PPOAgent
from esper.simic.records.record_columns import RoundRecord
from esper.simic.rollout import Rollout
from esper.simic.run.checkpoint import agent_parts, restore_agent
from esper.simic.training.setup import compile_mode, plugin_paths, policy_dtype
from esper.simic.training.trainee import AnyStep
from esper.tamiyo.policy.recurrent import FlatObservation
from esper.tolaria.precision import Precision


@dataclass(frozen=True, slots=True)
class GymSummary:
    """Outcome of a round of a Gymnasium task.

    Attributes:
        round: number of the round, from 1.
        episodes: number of episodes that ended in the round.
        episode_return: mean return of these episodes, unnormalised; NaN if no episode ended.
        episode_length: mean length of these episodes in steps; NaN if no episode ended.
        steps_per_second: environment steps per second, including the update.
        metrics: metrics of the update.
    """

    round: int
    episodes: int
    episode_return: float
    episode_length: float
    steps_per_second: float
    metrics: dict[str, float | None]


class GymRounds(ABC):
    """What a run on a Gymnasium task tells of its rounds, wherever the environments are.

    Attributes:
        agent: the learner.
    """

    backend_name = "gymnasium"

    config: TrainConfig
    agent: PPOAgent[FlatObservation]

    def __init__(self) -> None:
        self._episodes: list[Episode] = []
        self._boundary: dict[str, dict[str, Any]] = {}

    @property
    def steps(self) -> int:
        """See ``Trainee``."""
        return self.config.gymnasium.rollout_steps

    @property
    def count(self) -> int:
        """See ``Trainee``."""
        return self.config.world.envs

    @property
    def data_digests(self) -> dict[str, str]:
        """See ``Trainee``; empty, because an environment makes its own."""
        return {}

    @property
    def operation_threads(self) -> int:
        """See ``Trainee``."""
        return self.config.machine.threads or 1

    @property
    def precision(self) -> Precision:
        """See ``Trainee``."""
        return Precision(self.agent.device.type)

    def start_event(self, time: float, done: int) -> TrainingStarted:
        """See ``Trainee.start_event``."""
        name = self.config.gymnasium.gym
        assert name is not None
        return TrainingStarted(
            time=time,
            schema=SCHEMA_VERSION,
            round=done,
            rounds=self.config.world.rounds,
            tasks=[name],
            policy=self.config.method.algorithm,
            envs=self.count,
            group_size=1,
            episode_length=self.steps,
            slots=[[]],
            host_parameters=[0],
            device=self.config.machine.device,
            amp_enabled=False,
            gym=name,
            level=self.config.output.telemetry_level,
            amp_policy_dtype=self.agent.policy.amp_dtype_name,
        )

    def amp_scale(self) -> float | None:
        """See ``Trainee.amp_scale``; always None, because environments compute no losses."""
        return None

    def record(self, number: int, rollout: Rollout[FlatObservation]) -> RoundRecord | None:
        """See ``Trainee.record``."""
        return None

    def finish(
        self, hub: Hub, number: int, steps_per_second: float, metrics: dict[str, float | None]
    ) -> GymSummary:
        """See ``Trainee.finish``."""
        episodes = self._episodes
        returns, lengths = [e.episode_return for e in episodes], [e.length for e in episodes]
        hub.emit(
            GymEpisodes(
                time=time.time(),
                round=number,
                environment=[e.environment for e in episodes],
                episode_return=numbers(returns),
                length=lengths,
                terminated=[e.terminated for e in episodes],
            )
        )
        self._boundary = self.own_parts()
        return GymSummary(
            number,
            len(episodes),
            fmean(returns) if episodes else math.nan,
            fmean(lengths) if episodes else math.nan,
            steps_per_second,
            metrics,
        )

    def parts(self) -> dict[str, dict[str, Any]]:
        """See ``Trainee.parts``.

        Environments and recurrent state are those at the end of the last round, even if the next
        round has begun. The learner changes only between rounds.
        """
        return agent_parts(self.agent) | self._boundary

    @abstractmethod
    def own_parts(self) -> dict[str, dict[str, Any]]:
        """State of the environments, and of the policy's memory of them, at the end of a round."""


class GymTrainee(GymRounds):
    """Environments of a Gymnasium task and the policy that learns it; see ``Trainee``.

    Args:
        config: settings of the run, with ``gym`` set.
        device: device of the policy; environments run on the CPU.

    Raises:
        UsageError: a setting is invalid, or Esper does not support the task's spaces.
    """

    def __init__(self, config: TrainConfig, device: torch.device):
        super().__init__()
        self.environments = made_environments(config, 0, config.world.envs)
        self.config = complete_config(config)
        self.agent = build_gym_agent(self.config, self.environments.shape, device)
        self.environments.reset()
        self.agent.actor.begin(self.environments.identities.to(device), 0)
        self._boundary = self.own_parts()

    def collect(
        self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]
    ) -> Rollout[FlatObservation]:
        """See ``Trainee.collect``."""
        self._episodes = []

        def note_step(step: GymStep) -> None:
            self._episodes += step.ended
            on_step(step)

        return collect(self.environments, self.agent.actor, self.steps, number, note_step)

    def own_parts(self) -> dict[str, dict[str, Any]]:
        """See ``GymRounds``."""
        hidden = {str(i): state.clone() for i, state in enumerate(self.agent.actor.hidden)}
        return {
            "environments": self.environments.state(),
            "memory": hidden,
        }

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """See ``Trainee.restore``."""
        restore_agent(self.agent, parts)
        if "environments" not in parts:
            return  # a run with actors that ended in its first round
        try:
            hidden = tuple(parts["memory"][str(i)] for i in range(len(parts["memory"])))
            actor = self.agent.actor
            actor.hidden = tuple(
                state.copy_(source) for state, source in zip(actor.hidden, hidden, strict=True)
            )
            self.environments.load(parts["environments"])
        except UsageError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = first_line(error)
            raise UsageError(
                f"resume: the checkpoint belongs to another task ({reason})"
            ) from error
        self._boundary = self.own_parts()

    def close(self) -> None:
        """See ``Trainee.close``."""
        self.environments.close()


def made_environments(config: TrainConfig, begin: int, end: int) -> GymEnvironments:
    """The environments ``begin`` to ``end`` of the task, not yet reset.

    Raises:
        UsageError: there is no such task, or Esper does not support its spaces.
    """
    name = config.gymnasium.gym
    assert name is not None
    register()
    environments = make(name, arguments_of(config.gymnasium.gym_args), end - begin)
    return GymEnvironments(environments, config.world.seed, begin)


def complete_config(config: TrainConfig) -> TrainConfig:
    """The settings, completed with the values that depend on the machine."""
    threads = config.machine.threads or 1
    settings = {"plugin": plugin_paths(config), "threads": threads, **config.algorithm.resolved()}
    return unflatten(settings, config)


def build_gym_agent(
    config: TrainConfig, shape: Shape, device: torch.device
) -> PPOAgent[FlatObservation]:
    """The learner that ``config`` describes."""
    dtype, mode = policy_dtype(config, device), compile_mode(config.machine.compile, device)
    return gym_agent(config, shape, device, dtype, mode)


def arguments_of(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` texts into keyword arguments; a value that is not JSON is a string.

    Raises:
        UsageError: a text has no name, or a name occurs twice.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"gym_args: must be NAME=VALUE, got {shown(text)}")
        if name in arguments:
            raise UsageError(f"gym_args: {name} is given twice; keep one of them")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments
