"""Copies of a policy that cannot look at their host: a misled twin and a yoked copy.

A policy that looks at its host must be better than both. A policy that does not look is not. The
yoked copy is the control of operant conditioning (Church, "Systematic effect of random error in the
yoked control design", 1964): it acts exactly as often and as late as the policy.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from esper.simic.growth.environment import GrowthEnv
from esper.tamiyo.baselines import Actor, without_learning
from esper.tamiyo.policy.features import (
    EMPTY_SLOT_SIGNALS,
    HISTORY,
    HOST_FEATURES,
    SEED_SIGNALS,
    SLOT_FEATURES,
    Observation,
)

SCORES = (
    "validation_loss",
    "expected_accuracy",
    *(f"{name}_history_{i}" for name in ("loss", "accuracy") for i in range(HISTORY)),
    "train_loss",
    "train_accuracy",
    "rolled_back",
)
"""Host features that show how a host learns."""
_SCORES = [HOST_FEATURES.index(name) for name in SCORES]
_SIGNALS = [SLOT_FEATURES.index(name) for name in (*SEED_SIGNALS, *EMPTY_SLOT_SIGNALS)]


class MisledTwin:
    """A policy that sees the scores and the signals of seeds and empty slots of another host.

    It sees its own size, price, time, stages and legal actions. With strict gates the legal actions
    tell how a seed learns.

    Args:
        actor: the policy.
        donors: environment whose scores and signals each environment sees, int64 ``[N]``.
    """

    def __init__(self, actor: Actor, donors: Tensor):
        self.actor, self.donors = actor, donors

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self.actor.begin(environments, episode)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``."""
        host, slots = observation.host.clone(), observation.slots.clone()
        host[:, _SCORES] = host[self.donors][:, _SCORES]
        slots[..., _SIGNALS] = slots[self.donors][..., _SIGNALS]
        critic = observation.critic[self.donors]
        return self.actor.act(replace(observation, host=host, slots=slots, critic=critic), step)


class Recording:
    """A policy whose actions are kept.

    Args:
        actor: the policy.

    Attributes:
        actions: actions of the latest episode by step, each int64 ``[N, heads]``.
    """

    def __init__(self, actor: Actor):
        self.actor = actor
        self.actions: list[Tensor] = []

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self.actions = []
        self.actor.begin(environments, episode)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``."""
        decision = self.actor.act(observation, step)
        self.actions.append(decision[0].clone())
        return decision


class YokedCopy:
    """Repeats on each host what a policy did on another; an action may be illegal there.

    Args:
        actions: actions of the policy by step, each int64 ``[N, heads]``.
        donors: environment whose actions each environment repeats, int64 ``[N]``.
    """

    def __init__(self, actions: list[Tensor], donors: Tensor):
        self.actions, self.donors = actions, donors

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``."""
        return without_learning(self.actions[step][self.donors])


def misled_twin(actor: Callable[[GrowthEnv], Actor]) -> Callable[[GrowthEnv], Actor]:
    """The misled twin of the policy that ``actor`` makes, see ``donors_of``."""
    return lambda env: MisledTwin(actor(env), donors_of(env))


def record(
    actor: Callable[[GrowthEnv], Actor], into: list[Recording]
) -> Callable[[GrowthEnv], Actor]:
    """The policy that ``actor`` makes, with a recording of each batch of hosts in ``into``."""

    def recording(env: GrowthEnv) -> Actor:
        into.append(Recording(actor(env)))
        return into[-1]

    return recording


def yoked_copy(recordings: list[Recording]) -> Callable[[GrowthEnv], Actor]:
    """The yoked copy of a policy that has played the same hosts.

    Args:
        recordings: of each batch of hosts in the order in which they were played, see ``recorded``.
    """
    batches = iter(recordings)
    return lambda env: YokedCopy(next(batches).actions, donors_of(env))


def donors_of(env: GrowthEnv) -> Tensor:
    """For each environment one of another host, and if possible of another task, int64 ``[N]``.

    The hosts are those of the same batch, shifted cyclically; members keep their place in a group.

    Args:
        env: environments with assigned tasks, in whole groups.

    Raises:
        ValueError: there is a single host.
    """
    assert env.assignment is not None
    members = env.config.group_size
    tasks = env.assignment[::members]
    hosts = len(tasks)
    if hosts < 2:
        raise ValueError("a misled or yoked policy needs at least two hosts per batch")
    task_changes = [int((tasks != tasks.roll(-shift)).sum()) for shift in range(1, hosts)]
    shift = 1 + task_changes.index(max(task_changes))
    rows = torch.arange(len(env.assignment), device=env.assignment.device)
    return rows.roll(-shift * members)
