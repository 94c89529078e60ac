"""A task with masked MultiDiscrete actions: each of two actions must name what is shown."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH, OPTIONS = 20, 4


class MaskedToy(gymnasium.Env):
    """Shows two symbols for 20 steps; a mask forbids one wrong option of each action."""

    observation_space = spaces.MultiDiscrete([OPTIONS, OPTIONS])
    action_space = spaces.MultiDiscrete([OPTIONS, OPTIONS])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self.time = 0
        return self._next()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Reward the share of actions that equal their symbols."""
        reward = float(np.mean(np.asarray(action) == self.symbols))
        self.time += 1
        observation, info = self._next()
        return observation, reward, self.time == LENGTH, False, info

    def _next(self) -> tuple[Any, dict[str, Any]]:
        self.symbols = self.np_random.integers(OPTIONS, size=2)
        legal = np.ones((2, OPTIONS), np.int8)
        forbidden = (self.symbols + 1 + self.np_random.integers(OPTIONS - 1, size=2)) % OPTIONS
        legal[np.arange(2), forbidden] = 0
        return self.symbols.copy(), {"action_mask": tuple(legal)}


def masked_toy(**arguments: Any) -> MaskedToy:
    """Make the task."""
    return MaskedToy(**arguments)


gymnasium.register("test/MaskedToy-v0", masked_toy)
