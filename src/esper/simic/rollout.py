"""Collecting whole episodes of N environments into one buffer ``[T, N, ...]``."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from esper.simic.environment import GrowthEnv
from esper.simic.step import Step
from esper.tamiyo.policy.features import Observation


class Rollout:
    """One episode of each of N environments, preallocated and written in place.

    Attributes:
        observation: what was seen before each action, raw, leading axes ``[T, N]``.
        actions: int64 ``[T, N, heads]``.
        log_prob: of the actions when they were taken, ``[T, N]``.
        values: the critic's, normalised, ``[T, N]``.
        rewards: ``[T, N]``.
        terminated: bool ``[T, N]``.
    """

    def __init__(self, length: int, first: Observation, actions: Tensor):
        def space(like: Tensor) -> Tensor:
            return torch.zeros(length, *like.shape, dtype=like.dtype, device=like.device)

        tensors = {name: space(tensor) for name, tensor in first.tensors().items()}
        self.observation = Observation.from_tensors(tensors)
        self.actions = space(actions)
        self.log_prob = space(first.host[:, 0])
        self.values = space(first.host[:, 0])
        self.rewards = space(first.host[:, 0])
        self.terminated = space(first.host[:, 0].bool())

    def write(
        self, t: int, observation: Observation, actions: Tensor, log_prob: Tensor, value: Tensor
    ) -> None:
        """What was seen and done at step ``t``."""
        mine = self.observation.tensors()
        for name, tensor in observation.tensors().items():
            mine[name][t] = tensor
        self.actions[t] = actions
        self.log_prob[t] = log_prob
        self.values[t] = value

    def outcome(self, t: int, reward: Tensor, done: bool) -> None:
        """What came of step ``t``. The last step of an episode is terminated, not truncated."""
        self.rewards[t] = reward.to(self.rewards.dtype)
        self.terminated[t] = done


class Actor(Protocol):
    """Something that acts on observations, one step at a time."""

    def begin(self, environments: Tensor, episode: int) -> None:
        """Get ready for an episode."""
        ...

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Actions int64 ``[N, heads]``, their log-prob ``[N]`` and the value ``[N]``."""
        ...


def collect(
    environment: GrowthEnv,
    actor: Actor,
    episode: int,
    on_step: Callable[[int, Tensor, Step], None] | None = None,
) -> Rollout:
    """Run one episode of every environment.

    Args:
        environment: reset here.
        actor: chooses the actions.
        episode: number of the episode, part of every random draw in it.
        on_step: called after every step with its index, the actions and the result.
    """
    length = environment.config.episode_length
    actor.begin(environment.environments, episode)
    observation = environment.reset(episode)
    rollout: Rollout | None = None
    for t in range(length):
        actions, log_prob, value = actor.act(observation, t)
        rollout = rollout or Rollout(length, observation, actions)
        rollout.write(t, observation, actions, log_prob, value)
        step = environment.step(actions)
        rollout.outcome(t, step.reward, step.done)
        observation = step.observation
        if on_step is not None:
            on_step(t, actions, step)
    assert rollout is not None
    return rollout
