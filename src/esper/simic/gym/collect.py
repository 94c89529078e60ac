"""Acting in Gymnasium environments: rollouts across the ends of episodes, and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from esper.simic.actor import PolicyActor
from esper.simic.gym.lockstep import Environments, Episode
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


def collect(
    environments: Environments,
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
    actor.continue_rollout(environments.identities.to(actor.device), number, length)
    hidden = actor.hidden
    # In CPU memory, copied to the device once.
    rewards = np.zeros((length, environments.count))
    now = [x.numpy() for x in environments.observation.tensors().values()]
    observations = [np.zeros((length, *x.shape), x.dtype) for x in now]
    terminated, truncated, over = np.zeros((3, length, environments.count), dtype=np.bool_)
    rollout: Rollout[FlatObservation] | None = None
    with actor.policy.frozen_weights():
        for t in range(length):
            observation, over[t] = environments.observation.to(actor.device), environments.over
            actions, log_prob, value = actor.act(observation, t)
            rollout = rollout or Rollout(length, observation, actions)
            rollout.actions[t], rollout.log_prob[t], rollout.values[t] = actions, log_prob, value
            for rows, x in zip(observations, now, strict=True):
                rows[t] = x
            environments.step(actions.cpu().numpy())
            rewards[t], terminated[t] = environments.reward, environments.terminated
            truncated[t] = environments.truncated & ~environments.terminated
            if over[t].any():
                actor.reset_state(torch.from_numpy(over[t]).to(actor.device))
            if on_step is not None:
                on_step(GymStep(environments.count, t + 1 == length, environments.ended))
        assert rollout is not None
        rollout.last_observation = environments.observation.to(actor.device)
        rollout.last_value = actor.value(rollout.last_observation)
    for tensor, rows in zip(rollout.observation.tensors().values(), observations, strict=True):
        tensor.copy_(torch.from_numpy(rows))
    rollout.rewards.copy_(torch.from_numpy(rewards))
    rollout.terminated.copy_(torch.from_numpy(terminated))
    rollout.truncated.copy_(torch.from_numpy(truncated))
    rollout.valid, rollout.hidden = torch.from_numpy(~over), hidden
    return rollout


def play(
    actor: PolicyActor[FlatObservation], environments: Environments, greedy: bool = True
) -> list[Episode]:
    """Play one episode of every environment with an actor's policy; the actor stays as it is.

    Args:
        actor: the actor.
        environments: environments that nothing else uses; reset by this function.
        greedy: whether to take the most probable action rather than draw one.

    Returns:
        the first episode of each environment.
    """
    player = PolicyActor(actor.policy, actor.moments, actor.seed, actor.device)
    player.greedy = greedy
    environments.reset()
    player.begin(environments.identities.to(actor.device), 0)
    first: dict[int, Episode] = {}
    step = 0
    with actor.policy.frozen_weights():
        while len(first) < environments.count:
            actions, _, _ = player.act(environments.observation.to(actor.device), step)
            over = torch.from_numpy(environments.over.copy())
            environments.step(actions.cpu().numpy())
            player.reset_state(over.to(actor.device))
            for episode in environments.ended:
                first.setdefault(episode.environment, episode)
            step += 1
    return [first[i] for i in environments.identities.tolist()]
