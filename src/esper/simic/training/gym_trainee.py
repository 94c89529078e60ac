"""The trainees of a Gymnasium task, with environments in this process or in those of actors."""

import json
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.transfer import CPU
from esper.leyline.config import TrainConfig, shown, unflatten
from esper.leyline.errors import UsageError, first_line
from esper.leyline.events import GymEpisodes, GymEvaluation, numbers
from esper.leyline.events import number as number_of
from esper.nissa.hub import Hub
from esper.simic.actor import PolicyActor
from esper.simic.distributed.cluster import ActorSettings
from esper.simic.distributed.remote_actors import RemoteActors
from esper.simic.gym.action_spaces import to_bounds
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.collect import GymStep, collect, play
from esper.simic.gym.lockstep import Environments, Episode, Shape
from esper.simic.gym.process_environments import ProcessEnvironments
from esper.simic.gym.registration import register_envs
from esper.simic.gym.vector_environment import GymEnvironments, make, make_vector
from esper.simic.gym.vector_task import VectorEnvironments
from esper.simic.impala import load_snapshot, snapshot
from esper.simic.ppo import PPOAgent
from esper.simic.records.gym_record import GymRecord
from esper.simic.rollout import Rollout
from esper.simic.training.actor_specs import ActorSpec, actor_specs, concatenation, joined_rollout
from esper.simic.training.setup import compile_mode, plugin_paths, policy_dtype
from esper.simic.training.trainee import AnyStep, Trainee
from esper.tamiyo.policy.recurrent import FlatObservation
from esper.tolaria.precision import Precision

EVALUATION = 2**20
"""Identity of the first environment of an evaluation: beyond those of any training."""
State = dict[str, dict[str, Tensor]]
"""State of environments and of the policy's memory of them, as in a checkpoint."""


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
        evaluation: mean return of the evaluation after the update; NaN without one.
    """

    round: int
    episodes: int
    episode_return: float
    episode_length: float
    steps_per_second: float
    metrics: dict[str, float | None]
    evaluation: float = math.nan


class GymRounds(Trainee):
    """What a run on a Gymnasium task tells of its rounds, wherever the environments are.

    Args:
        config: settings of the run, with ``gym`` set.
        example: environments of the task, whose sizes the policy has.
        device: device of the policy; environments run on the CPU.
    """

    backend_name = "gymnasium"
    agent: PPOAgent[FlatObservation]
    _evaluator: Environments | None = None

    def __init__(self, config: TrainConfig, example: Environments, device: torch.device):
        self.actions = example.actions
        threads = config.machine.threads or 1
        settings = {"plugin": plugin_paths(config), "threads": threads}
        self.config = unflatten({**settings, **config.algorithm.resolved()}, config)
        self.policy, self.operation_threads = config.method.algorithm, threads
        self.agent = build_gym_agent(self.config, example.shape, device)
        self.precision = Precision(device.type)
        self._episodes: list[Episode] = []
        self._boundary: State = {}
        self._highest = torch.tensor(-math.inf, dtype=torch.float64)

    @property
    def steps(self) -> int:
        """See ``Trainee``."""
        return self.config.gymnasium.rollout_steps

    def description(self) -> dict[str, Any]:
        """See ``Trainee.description``."""
        return {
            "tasks": [self.config.gymnasium.gym],
            "group_size": 1,
            "slots": [[]],
            "host_parameters": [0],
            "device": self.config.machine.device,
            "gym": self.config.gymnasium.gym,
        }

    def record(self, number: int, rollout: Rollout[FlatObservation]) -> GymRecord:
        """See ``Trainee.record``."""
        # Actors tell of their environments after their first round.
        before = self._boundary.get("environments", {})
        lengths = before.get("lengths", torch.zeros(self.count, dtype=torch.int64))
        gym = self.config.gymnasium.gym
        assert gym is not None
        options, values = self.actions.options, self.known_values(rollout)
        choices = rollout.actions[..., len(options) :].cpu().numpy()
        numbers = to_bounds(choices, *self.actions.bounds)
        return GymRecord(number, gym, self.policy, rollout, lengths, options, numbers, values)

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
        self._boundary = self.state()
        evaluation = self._evaluate(hub, number)
        return GymSummary(
            number,
            len(episodes),
            fmean(returns) if episodes else math.nan,
            fmean(lengths) if episodes else math.nan,
            steps_per_second,
            metrics,
            evaluation,
        )

    def _evaluate(self, hub: Hub, number: int) -> float:
        """Evaluate the policy where that is due; returns the mean return, else NaN."""
        settings = self.config.gymnasium
        self.best = False
        if not settings.evaluate_every or number % settings.evaluate_every:
            return math.nan
        count = settings.evaluation_episodes
        if self._evaluator is None:
            self._evaluator = made_environments(self.config, EVALUATION, EVALUATION + count)
        actor = PolicyActor(self.agent.policy, self.agent.moments, 0, self.agent.device)
        mean = fmean(episode.episode_return for episode in play(actor, self._evaluator))
        self.best = mean > float(self._highest)
        self._highest = self._highest.clamp(min=mean)
        self.at_goal = settings.stop_at is not None and mean >= settings.stop_at
        hub.emit(
            GymEvaluation(
                time=time.time(),
                round=number,
                episodes=count,
                episode_return=number_of(mean),
                best=self.best,
            )
        )
        return mean

    @abstractmethod
    def state(self) -> State:
        """State of the environments, and of the policy's memory of them, at the end of a round."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Restore what ``state`` returned.

        Raises:
            RuntimeError, ValueError, KeyError, TypeError: it is that of another task.
        """

    def environment_parts(self) -> dict[str, dict[str, Any]]:
        """See ``Trainee.environment_parts``.

        Environments and recurrent state are those at the end of the last round, even if the next
        round has begun. The learner changes only between rounds.
        """
        return {**self._boundary, "evaluation": {"highest": self._highest}}

    def restore_environments(self, parts: dict[str, dict[str, Any]]) -> None:
        """See ``Trainee.restore_environments``."""
        if "environments" not in parts:
            return  # a run with actors that ended in its first round
        try:
            self.load({name: parts[name] for name in ("environments", "memory")})
        except UsageError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
            reason = first_line(error)
            raise UsageError(
                f"resume: the checkpoint belongs to another task ({reason})"
            ) from error
        self._boundary = self.state()
        self._highest = parts.get("evaluation", {}).get("highest", self._highest)

    def close(self) -> None:
        """See ``Trainee.close``."""
        if self._evaluator is not None:
            self._evaluator.close()


class GymTrainee(GymRounds):
    """Environments of a Gymnasium task and the policy that learns it; see ``Trainee``.

    Args:
        config: settings of the run, with ``gym`` set.
        device: device of the policy; environments run on the CPU.

    Raises:
        UsageError: a setting is invalid, or Esper does not support the task's spaces.
    """

    def __init__(self, config: TrainConfig, device: torch.device):
        self.environments = made_environments(config, 0, config.world.envs)
        super().__init__(config, self.environments, device)
        begin(self.environments, self.agent.actor)
        self._boundary = self.state()

    def collect(
        self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]
    ) -> Rollout[FlatObservation]:
        """See ``Trainee.collect``."""
        self._episodes = []

        def note_step(step: GymStep) -> None:
            self._episodes += step.ended
            on_step(step)

        return collect(self.environments, self.agent.actor, self.steps, number, note_step)

    def state(self) -> State:
        """See ``GymRounds.state``."""
        return state_of(self.environments, self.agent.actor)

    def load(self, state: State) -> None:
        """See ``GymRounds.load``."""
        begin(self.environments, self.agent.actor, state)

    def close(self) -> None:
        """See ``Trainee.close``."""
        super().close()
        self.environments.close()


class GymShard:
    """Environments of a Gymnasium task in the process of an actor; see ``Shard``.

    Args:
        spec: what to build.
        shared: nothing.
    """

    def __init__(self, spec: ActorSpec, shared: None):
        self.config = spec.config()
        self.environments = made_environments(self.config, spec.begin, spec.end)
        # A learner that never learns: its policy and its moments are what acts.
        agent = build_gym_agent(self.config, self.environments.shape, CPU)
        self.actor = spec.actor(agent.policy, agent.moments, self.config.world.seed)
        self.number: int | None = None

    def describe(self) -> None:
        """See ``Shard.describe``."""

    def collect(self, number: int, weights: dict[str, Any], before: Any) -> tuple[Any, Any]:
        """See ``Shard.collect``. Environments that this process did not leave are restored."""
        load_snapshot(self.actor, weights)
        if self.number is None or self.number != number - 1:
            begin(self.environments, self.actor, before)
        self.number = None
        episodes: list[list[Episode]] = []
        steps = self.config.gymnasium.rollout_steps
        rollout = collect(
            self.environments, self.actor, steps, number, lambda step: episodes.append(step.ended)
        )
        self.number = number
        result = {"rollout": rollout.state(), "ended": episodes}
        return result, state_of(self.environments, self.actor)


class RemoteGymTrainee(GymRounds):
    """Environments of actors and the policy that learns their task; see ``Trainee``.

    Args:
        config: settings of the run, with ``gym`` set.
        actors: where and how the environments run.
        device: device of the learner.

    Raises:
        UsageError: a setting is invalid, or the actors cannot be started.
    """

    def __init__(self, config: TrainConfig, actors: ActorSettings, device: torch.device):
        one = made_environments(config, 0, 1)
        one.close()
        super().__init__(config, one, device)
        world = config.world
        self.cuts = [len(part) for part in torch.arange(self.count).tensor_split(actors.count)]
        specs = actor_specs(self.config, self.cuts, actors.lag == 0)
        self.actors = RemoteActors(actors, GymShard, specs, None, world.rounds, world.envs)

    def collect(
        self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]
    ) -> Rollout[FlatObservation]:
        """See ``Trainee.collect``. The steps are told when all actors have delivered the round."""
        self._episodes = []
        contents, after, lag = self.actors.collect(number, snapshot(self.agent))
        self._last = _together(after)
        for t in range(self.steps):
            episodes = [episode for one in contents for episode in one["ended"][t]]
            self._episodes += episodes
            on_step(GymStep(self.count, t + 1 == self.steps, episodes))
        states = [one["rollout"] for one in contents]
        rollout = joined_rollout(FlatObservation, states, self.agent.device)
        rollout.lag = lag
        return rollout

    def state(self) -> State:
        """See ``GymRounds.state``."""
        return self._last

    def load(self, state: State) -> None:
        """See ``GymRounds.load``. Whether the environments fit, the actors find out."""
        self._last = state
        self.actors.begin(self.agent.updates + 1, _apart(state, self.cuts))

    def close(self) -> None:
        """See ``Trainee.close``."""
        super().close()
        self.actors.close()


def begin(
    environments: Environments, actor: PolicyActor[FlatObservation], state: State | None = None
) -> None:
    """Begin the first episodes with an empty memory, or continue from what ``state_of`` returned.

    Raises:
        RuntimeError, ValueError, KeyError: the state is that of another task.
        UsageError: see ``Environments.load``.
    """
    actor.begin(environments.identities.to(actor.device), 0)
    if state is None:
        environments.reset()
        return
    for hidden, source in zip(actor.hidden, state["memory"].values(), strict=True):
        hidden.copy_(source)
    environments.load(state["environments"])


def state_of(environments: Environments, actor: PolicyActor[FlatObservation]) -> State:
    """The state of environments, and of an actor's memory of them."""
    memory = {str(i): state.clone() for i, state in enumerate(actor.hidden)}
    return {"environments": environments.state(), "memory": memory}


def made_environments(config: TrainConfig, begin: int, end: int) -> Environments:
    """The environments ``begin`` to ``end`` of the task, not yet reset.

    Raises:
        UsageError: there is no such task, or Esper does not support its spaces.
    """
    gym, seed, count = config.gymnasium, config.world.seed, end - begin
    if gym.vectorization == "sync":
        return _in_turns(config, begin, end)
    assert gym.gym is not None
    register_envs()
    if gym.vectorization == "vector":
        envs = make_vector(gym.gym, arguments_of(gym.gym_args), count)
        return VectorEnvironments(envs, seed, begin, gym.episode_limit)
    specs = [replace(actor_specs(config, [1], False)[0], begin=i) for i in range(begin, end)]
    makers = [partial(_single, spec, os.getpid()) for spec in specs]
    return ProcessEnvironments(makers, seed, begin, gym.episode_limit)


def _in_turns(config: TrainConfig, begin: int, end: int) -> GymEnvironments:
    gym = config.gymnasium
    assert gym.gym is not None
    register_envs()
    environments = make(gym.gym, arguments_of(gym.gym_args), end - begin)
    return GymEnvironments(environments, config.world.seed, begin, gym.episode_limit)


def _single(spec: ActorSpec, process: int) -> GymEnvironments:
    """The environment of a process, or a further one in that which trains, where plugins ran."""
    is_worker = os.getpid() != process
    config = spec.config() if is_worker else unflatten(spec.settings)
    return _in_turns(config, spec.begin, spec.begin + 1)


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


def _together(states: Sequence[State]) -> State:
    """One state of the environments of all actors."""
    return {
        part: {
            name: concatenation([state[part][name] for state in states], int(part == "memory"))
            for name in states[0][part]
        }
        for part in states[0]
    }


def _apart(state: State, cuts: Sequence[int]) -> list[State]:
    """The inverse of ``_together``, for actors with ``cuts`` environments."""
    lengths = state["environments"]["lengths"]
    actions = [int(part.sum()) for part in lengths.split(list(cuts))]
    states: list[State] = [{part: {} for part in state} for _ in cuts]
    for part, tensors in state.items():
        for name, x in tensors.items():
            sizes = actions if name == "actions" else list(cuts)
            pieces = x.split(sizes, int(part == "memory"))
            for one, piece in zip(states, pieces, strict=True):
                one[part][name] = piece
    return states
