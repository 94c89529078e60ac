"""Collecting a fixed number of steps of every environment, across the ends of episodes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from esper.simic.gym.environment import Episode, GymEnvironments
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.recurrent import FlatObservation


@dataclass(frozen=True, slots=True)
class GymStep:
    """What a step of all environments brought.

    Attributes:
        count: environments.
        done: whether the rollout is complete.
        ended: episodes that ended.
    """

    count: int
    done: bool
    ended: list[Episode]


def collect(
    environments: GymEnvironments,
    agent: PPOAgent[FlatObservation],
    length: int,
    number: int,
    on_step: Callable[[GymStep], None] | None = None,
) -> Rollout[FlatObservation]:
    """``length`` steps of every environment, beginning where the last rollout ended.

    The step behind the end of an episode shows its final observation and only resets: it is not
    ``valid``. The critic's value there, with the memory of the episode, is V of the final
    observation, which is what a truncated step is bootstrapped from; then the memory begins anew.

    Args:
        environments: go on from where they are.
        agent: likewise, with its memory.
        length: T.
        number: of the rollout, part of every draw of an action.
        on_step: called after every step.
    """
    agent.go_on(torch.arange(environments.count, device=agent.device), number)
    hidden = agent.hidden
    valid = torch.zeros(length, environments.count, dtype=torch.bool)
    rollout: Rollout[FlatObservation] | None = None
    for t in range(length):
        seen = environments.observation.to(agent.device)
        over = torch.from_numpy(environments.over.copy())
        valid[t] = ~over
        actions, log_prob, value = agent.act(seen, t)
        rollout = rollout or Rollout(length, seen, actions)
        rollout.write(t, seen, actions, log_prob, value)
        environments.step(actions.cpu().numpy())
        if bool(over.any()):
            agent.forget(over.to(agent.device))
        rollout.rewards[t] = torch.from_numpy(environments.reward)
        rollout.terminated[t] = torch.from_numpy(environments.terminated)
        rollout.truncated[t] = torch.from_numpy(environments.truncated & ~environments.terminated)
        if on_step is not None:
            on_step(GymStep(environments.count, t + 1 == length, environments.ended))
    assert rollout is not None
    rollout.last_value = agent.value(environments.observation.to(agent.device))
    rollout.hidden, rollout.valid = hidden, valid
    return rollout
