"""Evaluation of a policy on a Gymnasium task, without learning."""

import torch

from esper.simic.gym.vector_environment import Episode, GymEnvironments
from esper.simic.ppo import PPOAgent
from esper.tamiyo.policy.recurrent import FlatObservation


def play(
    agent: PPOAgent[FlatObservation], environments: GymEnvironments, greedy: bool = True
) -> list[Episode]:
    """Play one episode of every environment; the agent's recurrent state is restored afterwards.

    Args:
        agent: the agent.
        environments: environments that nothing else uses; reset by this function.
        greedy: whether to take the most probable action rather than draw one.

    Returns:
        the first episode of each environment.
    """
    state = agent.hidden, agent.greedy
    agent.greedy = greedy
    environments.reset()
    agent.begin(torch.arange(environments.count, device=agent.device), 0)
    first: dict[int, Episode] = {}
    step = 0
    with agent.policy.frozen_weights():
        while len(first) < environments.count:
            actions, _, _ = agent.act(environments.observation.to(agent.device), step)
            over = torch.from_numpy(environments.over.copy())
            environments.step(actions.cpu().numpy())
            agent.reset_state(over.to(agent.device))
            for episode in environments.ended:
                first.setdefault(episode.environment, episode)
            step += 1
    agent.hidden, agent.greedy = state
    return [first[i] for i in range(environments.count)]
