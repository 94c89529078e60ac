"""The environments of a Gymnasium ``VectorEnv``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.errors import UsageError, first_line
from esper.simic.gym.action_spaces import Choices
from esper.simic.gym.lockstep import Environments
from esper.simic.gym.vector_environment import actions_of, features_of, observed_space, shape_of


class VectorEnvironments(Environments):
    """The environments of a ``VectorEnv``.

    It draws the seeds of later episodes itself, so what it observes depends on all actions since
    it was reset with a seed. After ``limit`` steps it is therefore reset with the next seed, which
    truncates its episodes and bounds what a checkpoint holds and resuming repeats.

    Args:
        envs: the environments, not yet reset.
        seed, first, limit: see ``Environments``.

    Raises:
        UsageError: Esper does not support a space, or the way in which episodes begin.
    """

    def __init__(
        self, envs: VectorEnv[Any, Any, Any], seed: int, first: int = 0, limit: int = 10**9
    ):
        mode = envs.metadata.get("autoreset_mode")
        if AutoresetMode.NEXT_STEP not in (mode, getattr(mode, "value", mode)):
            raise UsageError(
                f"gym: episodes begin in another way than NextStep ({mode}); make the VectorEnv "
                "with AutoresetMode.NEXT_STEP"
            )
        super().__init__(shape_of(envs), actions_of(envs), envs.num_envs, seed, first, limit)
        self.envs = envs
        self._history: list[Choices] = []
        self._resets = 0

    def reset(self) -> None:
        """See ``Environments.reset``."""
        self._reset(0)

    def _reset(self, number: int) -> None:
        """Begin episodes with the seed ``number``."""
        key = self.seed, self.identities[:1], Purpose.GYM_RESET, number, 0, 1
        observation, info = self._result(lambda: self.envs.reset(seed=int(random_bits(*key))), 2)
        self._resets, self._history = number, []
        self._begin_all()
        self._observe(observation, info)

    def step(self, choices: Choices) -> None:
        """See ``Environments.step``."""
        if len(self._history) >= self.limit:
            self._reset(self._resets + 1)
            return
        space = self.envs.single_action_space
        out: Any = create_empty_array(space, self.count)
        actions = concatenate(space, self.actions.of(choices), out)
        result = self._result(lambda: self.envs.step(actions), 5)
        observation, reward, terminated, truncated, info = result
        self._history.append(choices.copy())
        begun = self.over
        flags = (np.array(terminated, np.bool_), np.array(truncated, np.bool_))
        last = len(self._history) >= self.limit
        if last:
            flags[1][~begun] = True
        self._note(np.array(reward, np.float64), *flags)
        # One that has just begun has no episode to truncate.
        self.over = self.over | last
        self._observe(observation, info)

    def _result(self, call: Callable[[], Any], length: int) -> Any:
        """What a call of the VectorEnv returns.

        Raises:
            UsageError: it fails, or returns another number of values.
        """
        step = len(self._history)
        try:
            result = call()
        except Exception as error:
            reason = f"raised {type(error).__name__}: {first_line(error)}"
            raise UsageError(f"gym: the VectorEnv {reason}, after {step} steps") from error
        if not isinstance(result, tuple) or len(result) != length:
            raise UsageError(f"gym: the VectorEnv did not return {length} values, step {step}")
        return result

    def _observe(self, observation: Any, info: dict[str, Any]) -> None:
        """Store observations and masks.

        Raises:
            UsageError: an observation is of another space, or a mask is invalid.
        """
        space = observed_space(self.envs)
        try:
            each = iterate(self.envs.observation_space, observation)
            self._features[:] = [features_of(space, one) for one in each]
        except Exception as error:
            raise UsageError(
                f"gym: the VectorEnv does not observe {space}: {first_line(error)}"
            ) from error
        masks = info.get("action_mask", [None] * self.count)
        present = info.get("_action_mask", np.ones(self.count, np.bool_)) & ~self.over
        for i, mask in enumerate(masks):
            try:
                self.actions.write_mask(mask if present[i] else None, self._masks[i])
            except (ValueError, TypeError) as error:
                raise UsageError(f"gym: action_mask of environment {i} {error}") from error

    def close(self) -> None:
        """See ``Environments.close``."""
        self.envs.close()

    def state(self) -> dict[str, torch.Tensor]:
        """Number of the last seed, actions since, and current observations."""
        columns = len(self.actions.options) + self.actions.components
        dtype = np.float32 if self.actions.components else np.int64
        actions = np.array(self._history, dtype).reshape(-1, self.count, columns)
        return {
            "lengths": torch.from_numpy(self.lengths.copy()),
            "resets": torch.tensor(self._resets),
            "actions": torch.from_numpy(actions),
            "features": self.observation.features.clone(),
            "masks": self.observation.masks.clone(),
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See ``Environments.load``."""
        actions = state["actions"].numpy()
        if actions.shape[1] != self.count or state["features"].shape != self._features.shape:
            raise ValueError("the environments differ")
        self._reset(int(state["resets"]))
        for choices in actions:
            self.step(choices)
        for i in range(self.count):
            self._compare(i, state)
