"""Environments of a Gymnasium task in the processes of actors, and their trainee."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.transfer import CPU
from esper.leyline.config import TrainConfig
from esper.leyline.errors import UsageError
from esper.nissa.hub import Hub
from esper.simic.actor import PolicyActor, load_snapshot, snapshot
from esper.simic.distributed.cluster import ActorSettings, Cluster
from esper.simic.distributed.placed_actor import PlacedActor
from esper.simic.distributed.remote_actors import RemoteActors, mean_lag
from esper.simic.distributed.wire import as_arrays, as_tensors
from esper.simic.gym.collect import GymStep, collect
from esper.simic.gym.vector_environment import Episode
from esper.simic.rollout import Rollout
from esper.simic.run.checkpoint import restore_agent
from esper.simic.training.actor_specs import ActorSpec, actor_specs, concatenation, joined_rollout
from esper.simic.training.gym_trainee import (
    GymRounds,
    build_gym_agent,
    complete_config,
    made_environments,
)
from esper.simic.training.trainee import AnyStep
from esper.tamiyo.policy.recurrent import FlatObservation

State = dict[str, dict[str, Tensor]]
"""State of environments and of the policy's memory of them, as in a checkpoint."""


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
        parts = agent.policy, agent.moments, self.config.world.seed, CPU
        rows = spec.begin, spec.end, spec.total
        self.actor: PolicyActor[FlatObservation] = (
            PlacedActor(*parts, *rows) if spec.synchronous else PolicyActor(*parts)
        )
        self.number: int | None = None

    def describe(self) -> None:
        """See ``Shard.describe``."""

    def collect(self, number: int, weights: dict[str, Any], before: Any) -> tuple[Any, Any]:
        """See ``Shard.collect``. Environments that this process did not leave are restored."""
        load_snapshot(self.actor, as_tensors(weights))
        if self.number is None or self.number != number - 1:
            self._restore(as_tensors(before))
        self.number = None
        episodes: list[list[Episode]] = []
        steps = self.config.gymnasium.rollout_steps
        rollout = collect(
            self.environments, self.actor, steps, number, lambda step: episodes.append(step.ended)
        )
        self.number = number
        state = {"environments": self.environments.state(), "memory": _memory(self.actor)}
        return as_arrays({"rollout": rollout.state(), "ended": episodes}), as_arrays(state)

    def _restore(self, state: State | None) -> None:
        self.actor.begin(self.environments.identities, 0)
        if state is None:
            self.environments.reset()
            return
        memory = state["memory"]
        self.actor.hidden = tuple(memory[str(i)] for i in range(len(memory)))
        self.environments.load(state["environments"])


class RemoteGymTrainee(GymRounds):
    """Environments of actors and the policy that learns their task; see ``Trainee``.

    Args:
        config: settings of the run, with ``gym`` set.
        actors: where and how the environments run.
        device: device of the learner.
        check: called while waiting for actors; may raise.

    Raises:
        UsageError: a setting is invalid, or the actors cannot be started.
    """

    def __init__(
        self,
        config: TrainConfig,
        actors: ActorSettings,
        device: torch.device,
        check: Callable[[], None],
    ):
        super().__init__()
        one = made_environments(config, 0, 1)
        one.close()
        self.config = complete_config(config)
        self.agent = build_gym_agent(self.config, one.shape, device)
        self._check, lag, rounds = check, actors.lag, config.world.rounds
        self.cuts = [len(part) for part in torch.arange(self.count).tensor_split(actors.count)]
        specs = actor_specs(self.config, self.cuts, lag == 0)
        self.cluster = Cluster(actors.address, actors.count)
        try:
            self.actors = RemoteActors(self.cluster, GymShard, specs, None, lag, rounds, self.count)
        except BaseException:
            self.cluster.close()
            raise

    def collect(
        self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]
    ) -> Rollout[FlatObservation]:
        """See ``Trainee.collect``. The steps are told when all actors have delivered the round."""
        self._episodes = []
        weights = as_arrays(snapshot(self.agent))
        deliveries = self.actors.collect(number, weights, self._check)
        contents = [as_tensors(delivery.rollout) for delivery in deliveries]
        self._last = _together([as_tensors(delivery.after) for delivery in deliveries])
        for t in range(self.steps):
            episodes = [episode for one in contents for episode in one["ended"][t]]
            self._episodes += episodes
            on_step(GymStep(self.count, t + 1 == self.steps, episodes))
        states = [one["rollout"] for one in contents]
        rollout = joined_rollout(FlatObservation, states, self.agent.device)
        rollout.lag = mean_lag(deliveries, number, self.actors.lag)
        return rollout

    def own_parts(self) -> dict[str, dict[str, Any]]:
        """See ``GymRounds``."""
        return self._last

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """See ``Trainee.restore``. Whether the environments fit, the actors find out."""
        restore_agent(self.agent, parts)
        if "environments" not in parts:
            return  # the run ended in its first round
        try:
            self._last = {name: parts[name] for name in ("environments", "memory")}
            states = _apart(self._last, self.cuts)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise UsageError("resume: the checkpoint belongs to another task") from error
        self._boundary = self._last
        self.actors.begin(self.agent.updates + 1, [as_arrays(state) for state in states])

    def close(self) -> None:
        """See ``Trainee.close``."""
        self.actors.close()
        self.cluster.close()


def _memory(actor: PolicyActor[FlatObservation]) -> dict[str, Tensor]:
    return {str(i): state for i, state in enumerate(actor.hidden)}


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
