"""Collecting a fixed number of steps of every environment, across the ends of episodes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from esper.simic.actor import PolicyActor
from esper.simic.gym.vector_environment import Episode, GymEnvironments
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.recurrent import FlatObservation


@dataclass(frozen=True, slots=True)
class GymStep:
    """Result of one step of all environments.

    Attributes:
        count: number of environments.
        done: whether the rollout is complete.
        ended: episodes that ended in the step.
    """

    count: int
    done: bool
    ended: list[Episode]


class _Outcomes:
    """Rewards and episode ends of a rollout, kept in CPU memory and copied to the device once."""

    def __init__(self, length: int, count: int):
        self.rewards = np.zeros((length, count))
        self.terminated, self.truncated, self.valid = np.zeros((3, length, count), dtype=np.bool_)

    def write(self, t: int, environments: GymEnvironments, over: NDArray[np.bool_]) -> None:
        """Store the outcome of step ``t``; the environments ``over [N]`` were only reset."""
        self.rewards[t] = environments.reward
        self.terminated[t] = environments.terminated
        self.truncated[t] = environments.truncated & ~environments.terminated
        self.valid[t] = ~over

    def put_into(self, rollout: Rollout[FlatObservation]) -> None:
        """Copy the outcomes into ``rollout``."""
        for name in ("rewards", "terminated", "truncated"):
            getattr(rollout, name).copy_(torch.from_numpy(getattr(self, name)))
        rollout.valid = torch.from_numpy(self.valid)


def collect(
    environments: GymEnvironments,
    actor: PolicyActor[FlatObservation],
    length: int,
    number: int,
    on_step: Callable[[GymStep], None] | None = None,
) -> Rollout[FlatObservation]:
    """Collect ``length`` steps of every environment, starting where the last rollout ended.

    The step after the end of an episode observes the episode's final observation and only resets
    the environment, so it is not ``valid``. The critic's value in that step, with the recurrent
    state of the episode, is V of the final observation, from which a truncated step is
    bootstrapped. After that step the recurrent state is reset.

    Args:
        environments: environments, continued from their current state.
        actor: actor, continued from its current recurrent state.
        length: number of steps T.
        number: number of the rollout, part of the key of the random draws of actions.
        on_step: called after every step.
    """
    actor.continue_rollout(environments.identities.to(actor.device), number)
    hidden = actor.hidden
    outcomes = _Outcomes(length, environments.count)
    rollout: Rollout[FlatObservation] | None = None
    with actor.policy.frozen_weights():
        for t in range(length):
            observation = environments.observation.to(actor.device)
            over = environments.over.copy()
            actions, log_prob, value = actor.act(observation, t)
            rollout = rollout or Rollout(length, observation, actions)
            rollout.write(t, observation, actions, log_prob, value)
            environments.step(actions.cpu().numpy())
            outcomes.write(t, environments, over)
            if over.any():
                actor.reset_state(torch.from_numpy(over).to(actor.device))
            if on_step is not None:
                on_step(GymStep(environments.count, t + 1 == length, environments.ended))
        assert rollout is not None
        rollout.last_observation = environments.observation.to(actor.device)
        rollout.last_value = actor.value(rollout.last_observation)
    outcomes.put_into(rollout)
    rollout.hidden = hidden
    return rollout
