"""A Gymnasium environment whose episodes end in every way, for the tests of the adapter."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.config.reading import with_horizons
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.vector_environment import GymEnvironments
from esper.simic.ppo import PPOAgent

CPU = torch.device("cpu")
OPTIONS = (3, 2)


class Scripted(gymnasium.Env):
    """Random features and rewards; 1 to 7 steps, then terminated or truncated; random masks.

    Everything follows from the seed of the reset. ``log`` keeps what was shown and done.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2, 2), np.float64)
    action_space = spaces.MultiDiscrete(OPTIONS, start=[1, 0])

    def __init__(self, masked: bool = True, shortest: int = 1, longest: int = 7):
        self.masked, self.range = masked, (shortest, longest + 1)
        self.log: list[dict[str, Any]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(*self.range))
        self.kind = bool(self.np_random.integers(2))
        self.log.append({"seed": seed, "steps": []})
        return self._see()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.left > 0, "stepped past the end"
        assert self.action_space.contains(action), action
        choices = action - self.action_space.start
        assert all(mask[i] for mask, i in zip(self.legal, choices, strict=True)), "illegal"
        self.left -= 1
        reward = float(self.np_random.normal(2.0, 3.0))
        over = self.left == 0
        self.log[-1]["steps"].append({"action": choices.tolist(), "reward": reward})
        terminated, truncated = over and self.kind, over and not self.kind
        return *self._see()[:1], reward, terminated, truncated, self.info

    def _see(self) -> tuple[Any, dict]:
        draw = self.np_random
        self.legal = [np.ones(n, dtype=np.int8) for n in OPTIONS]
        if self.masked:
            self.legal = [(draw.random(n) < 0.5).astype(np.int8) for n in OPTIONS]
            for mask in self.legal:
                mask[draw.integers(len(mask))] = 1
        self.info = {"action_mask": tuple(self.legal)} if self.masked else {}
        seen = draw.normal(1.0, 2.0, (2, 2))
        return seen, self.info


def scripted(count: int, seed: int = 3, first: int = 0, **arguments: Any) -> GymEnvironments:
    """Environments that have been reset."""
    environments = GymEnvironments([Scripted(**arguments) for _ in range(count)], seed, first)
    environments.reset()
    return environments


def config_with(**settings: Any) -> TrainConfig:
    """Settings of a Gymnasium task with a small network."""
    return with_horizons(unflatten({"gym": "Scripted", "lstm_hidden": 8, "seed": 3, **settings}))


def agent_for(environments: GymEnvironments, **settings: Any) -> PPOAgent:
    """A learner that is about to act in the environments."""
    agent = gym_agent(config_with(**settings), environments.shape, CPU)
    agent.begin(torch.arange(environments.count), 0)
    return agent
