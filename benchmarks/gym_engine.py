"""Rollout and update of the recurrent engine on an environment that does nothing."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from esper.leyline.config import unflatten
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.collect import collect
from esper.simic.gym.lockstep import Shape
from esper.simic.gym.vector_environment import GymEnvironments
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.recurrent import FlatObservation

STEPS, ENVS, INPUTS, MEMORY = 150, 16, 128, 512
OPTIONS = (3, 8, 4, 3, 3, 4, 4, 6)
CPU = torch.device("cpu")
SETTINGS = {
    "gym": "Idle",
    "envs": ENVS,
    "rollout_steps": STEPS,
    "lstm_hidden": MEMORY,
    "ppo_epochs": 1,
    "minibatches": 1,
    "target_kl": 1e9,
    "lr_decay": "none",
    "entropy_decay": "none",
    "normalise_observations": False,
}


class Idle(gymnasium.Env):
    """An environment without dynamics: each observation is one of a few rows of noise.

    Args:
        length: steps of an episode.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (INPUTS,), np.float32)
    action_space = spaces.MultiDiscrete(list(OPTIONS))

    def __init__(self, length: float = STEPS) -> None:
        self.length = length
        self.rows = np.random.default_rng(0).standard_normal((16, INPUTS)).astype(np.float32)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self.time = 0
        return self.rows[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance time by one step; the action has no effect."""
        self.time += 1
        row = self.rows[self.time % 16]
        return row, float(row[0]), self.time == self.length, False, {}


class Ours:
    """Rollout and update of the engine.

    Args:
        amp_dtype: dtype of the policy's trunk, None for full precision.
        device: device of the policy.
        captured: whether rollout steps and updates are captured as CUDA graphs.
    """

    def __init__(
        self, amp_dtype: torch.dtype | None, device: torch.device = CPU, captured: bool = False
    ):
        self.environments = GymEnvironments([Idle() for _ in range(ENVS)], 1)
        self.environments.reset()
        shape = Shape(INPUTS, OPTIONS, True)
        mode = "default" if captured else "off"
        self.agent = gym_agent(unflatten(SETTINGS), shape, device, amp_dtype, mode)
        # Graphs are captured of what is compiled or not; compiling would take minutes.
        self.agent.compiled.active = False
        self.agent.begin(torch.arange(ENVS), 0)
        self.number = 0
        self.rollout = self.collect()

    def collect(self) -> Rollout[FlatObservation]:
        """Collect one rollout."""
        self.number += 1
        return collect(self.environments, self.agent, STEPS, self.number)

    def update(self) -> None:
        """Learn from the rollout."""
        self.agent.update(self.rollout)
