"""Collecting a fixed number of steps of every environment, across the ends of episodes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from esper.simic.gym.vector_environment import Episode, GymEnvironments
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


class _Outcomes:
    """What came of each step, on the host: the device gets that of a whole rollout in one go."""

    def __init__(self, length: int, count: int):
        self.rewards = np.zeros((length, count))
        self.terminated, self.truncated, self.valid = np.zeros((3, length, count), dtype=np.bool_)

    def write(self, t: int, environments: GymEnvironments, over: NDArray[np.bool_]) -> None:
        """Take in step ``t``, which only reset the environments ``over``."""
        self.rewards[t] = environments.reward
        self.terminated[t] = environments.terminated
        self.truncated[t] = environments.truncated & ~environments.terminated
        self.valid[t] = ~over

    def put_into(self, rollout: Rollout[FlatObservation]) -> None:
        """Complete ``rollout``."""
        for name in ("rewards", "terminated", "truncated"):
            getattr(rollout, name).copy_(torch.from_numpy(getattr(self, name)))
        rollout.valid = torch.from_numpy(self.valid)


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
    agent.continue_rollout(torch.arange(environments.count, device=agent.device), number)
    hidden = agent.hidden
    outcomes = _Outcomes(length, environments.count)
    rollout: Rollout[FlatObservation] | None = None
    with agent.policy.frozen_weights():
        for t in range(length):
            seen = environments.observation.to(agent.device)
            over = environments.over.copy()
            actions, log_prob, value = agent.act(seen, t)
            rollout = rollout or Rollout(length, seen, actions)
            rollout.write(t, seen, actions, log_prob, value)
            environments.step(actions.cpu().numpy())
            outcomes.write(t, environments, over)
            if over.any():
                agent.reset_state(torch.from_numpy(over).to(agent.device))
            if on_step is not None:
                on_step(GymStep(environments.count, t + 1 == length, environments.ended))
        assert rollout is not None
        rollout.last_value = agent.value(environments.observation.to(agent.device))
    outcomes.put_into(rollout)
    rollout.hidden = hidden
    return rollout
