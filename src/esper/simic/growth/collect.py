"""Collecting whole episodes of N growth environments into a rollout."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import Step
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import Observation


class Actor(Protocol):
    """Chooses actions from observations, one step at a time."""

    def begin(self, environments: Tensor, episode: int) -> None:
        """Prepare for an episode of the given environments."""
        ...

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Actions int64 ``[N, heads]``, their log-probs ``[N]`` and the values ``[N]``."""
        ...


def collect(
    environment: GrowthEnv,
    actor: Actor,
    episode: int,
    on_step: Callable[[int, Tensor, Step], None] | None = None,
) -> Rollout[Observation]:
    """Run one episode of every environment.

    Args:
        environment: the environments; reset by this function.
        actor: chooses the actions.
        episode: number of the episode, part of the key of every random draw.
        on_step: called after every step with its index, the actions and the result.
    """
    length = environment.config.episode_length
    actor.begin(environment.environments, episode)
    observation = environment.reset(episode)
    rollout: Rollout[Observation] | None = None
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
