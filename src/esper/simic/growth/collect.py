"""Collecting whole episodes of N growth environments into a rollout."""

from collections.abc import Callable

from torch import Tensor

from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import Step
from esper.simic.rollout import Rollout
from esper.tamiyo.baselines import Actor
from esper.tamiyo.policy.features import Observation


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
