"""Box actions beside heads: the policy finds the best of both."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from esper.leyline.config import unflatten
from esper.leyline.config.reading import with_horizons
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.collect import collect, play
from esper.simic.gym.vector_environment import GymEnvironments

ROUNDS = 5


class Target(gymnasium.Env):
    """A number in [-4, 2] is to follow the observation, and a head its sign: 2 a step at best."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float64)
    action_space = spaces.Dict(number=spaces.Box(-4.0, 2.0, ()), sign=spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.target = 8, self.np_random.uniform(-1.0, 1.0, 1)
        return self.target, {}

    def step(self, action):
        assert self.action_space.contains(action)
        error = abs(float(action["number"]) - float(self.target[0]))
        reward = 1.0 - error + float((action["sign"] == 1) == (self.target[0] > 0.0))
        self.left -= 1
        self.target = self.np_random.uniform(-1.0, 1.0, 1)
        return self.target, reward, self.left == 0, False, {}


def test_a_policy_learns_a_number_and_an_option_together() -> None:
    settings = {"gym": "test/Target-v0", "memory": "none", "rounds": ROUNDS, "rollout_steps": 64}
    config = with_horizons(unflatten(settings))
    environments = GymEnvironments([Target() for _ in range(8)], 1)
    agent = gym_agent(config, environments.shape, torch.device("cpu"))
    assert agent.policy.heads == ("action", "numbers")
    evaluation = GymEnvironments([Target() for _ in range(20)], 2)

    def mean_return() -> float:
        return float(np.mean([episode.episode_return for episode in play(agent, evaluation)]))

    before = mean_return()
    environments.reset()
    agent.begin(environments.identities, 0)
    for number in range(1, ROUNDS + 1):
        metrics = agent.update(collect(environments, agent, 64, number))
        assert metrics["head_grad_norms/numbers"] > 0.0
    assert mean_return() > before + 0.6 * (16.0 - before)
