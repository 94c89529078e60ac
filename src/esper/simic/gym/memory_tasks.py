"""Tasks that require memory, registered with Gymnasium under ``esper/``.

``esper/MaskedCartPole-v0`` is CartPole-v1 without its velocities. ``esper/MemoryChain-v0`` shows a
bit that the action must repeat ``length`` steps later ("memory length" in Osband et al., "Behaviour
suite for reinforcement learning", 2020).
"""

from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium import Env, spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TransformObservation
from numpy.typing import NDArray

POSITIONS = [0, 2]
"""Indices of the cart's position and the pole's angle in CartPole's observation."""


def masked_cart_pole(**arguments: Any) -> Env[Any, Any]:
    """CartPole without its velocities, which must be inferred from earlier observations."""
    environment = CartPoleEnv(**arguments)
    box = environment.observation_space
    assert isinstance(box, spaces.Box)
    positions = spaces.Box(box.low[POSITIONS], box.high[POSITIONS])
    return TransformObservation(environment, itemgetter(POSITIONS), positions)


class MemoryChain(Env[NDArray[np.int64], np.int64]):
    """Shows a bit in the first step; the action ``length`` steps later must repeat it.

    An episode has ``length + 1`` steps. The observation is the bit (0 or 1 in the first step, 2
    afterwards) and whether the next action, the last, is rewarded. The reward is 1 if that action
    equals the bit and -1 if not; other actions have no effect.

    Args:
        length: steps from the bit to the rewarded action, at least 1.

    Raises:
        ValueError: ``length`` is below 1.
    """

    def __init__(self, length: int = 8):
        if type(length) is not int or length < 1:
            raise ValueError(f"length must be a whole number of at least 1, got {length!r}")
        self.length = length
        self.observation_space = spaces.MultiDiscrete([3, 2])
        self.action_space = spaces.Discrete(2)
        self._bit = self._time = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Draw a bit; the observation contains it."""
        super().reset(seed=seed)
        self._bit, self._time = int(self.np_random.integers(2)), 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, dict[str, Any]]:
        """Take one step; only the last step has a reward."""
        over = self._time == self.length
        reward = (1.0 if int(action) == self._bit else -1.0) if over else 0.0
        self._time += 1
        return self._observation(), reward, over, False, {}

    def _observation(self) -> NDArray[np.int64]:
        return np.array([self._bit if self._time == 0 else 2, self._time == self.length], np.int64)
