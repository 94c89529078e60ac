"""N Gymnasium environments in this process; each is reset in the step after its episode ends.

Observations are flat features; for actions see ``action_spaces``.

An episode is a function of its seed and its actions; its seed is a function of the run's seed, the
environment and the episode number. An environment is therefore saved as its episode number and the
actions taken in that episode, and is restored by replaying them. No pickle is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Env, spaces
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.errors import UsageError, first_line, suggestion
from esper.runtime.gate import NOTHING
from esper.runtime.plugins import is_imported
from esper.simic.gym.action_spaces import Actions, Choices, leaves
from esper.simic.gym.lockstep import Environments, Episode, Shape, mismatch

MAX_FEATURES = 1_000_000
MAX_OPTIONS = 100_000
FLAT = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces without parts that can be observed."""
RESULT = ("observation", "reward", "terminated", "truncated", "info")
"""What ``step`` of an environment returns."""


def features_of(space: spaces.Space[Any], observation: Any) -> NDArray[Any]:
    """An observation as flat features: values of a Box, bits, one-hot options, one after another.

    Dict, Tuple and their parts are flattened as Gymnasium does.
    """
    if isinstance(space, spaces.Box):
        return np.asarray(observation).reshape(-1)
    return np.asarray(spaces.flatten(space, observation))


AnyEnv = Env[Any, Any] | VectorEnv[Any, Any, Any]


def observed_space(env: AnyEnv) -> spaces.Space[Any]:
    """The space of an observation of one environment."""
    return env.single_observation_space if isinstance(env, VectorEnv) else env.observation_space


def acted_space(env: AnyEnv) -> spaces.Space[Any]:
    """The space of an action of one environment."""
    return env.single_action_space if isinstance(env, VectorEnv) else env.action_space


def shape_of(env: AnyEnv) -> Shape:
    """The sizes of a policy that acts in ``env``.

    Raises:
        UsageError: Esper does not support one of the spaces, or it is too large.
    """
    space = observed_space(env)
    parts = list(leaves(space))
    if not all(isinstance(part, FLAT) for part in parts):
        kinds = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them"
        raise _refusal(env, "observations", space, kinds)
    width = spaces.flatdim(space)
    if not 1 <= width <= MAX_FEATURES:
        raise UsageError(
            f"gym: observations of {_name(env)} are {width} numbers; Esper takes 1 to "
            f"{MAX_FEATURES}"
        )
    ends = np.cumsum([0, *map(spaces.flatdim, parts)]).tolist()
    boxes = [isinstance(part, spaces.Box) for part in parts]
    raw = [pair for pair, box in zip(pairwise(ends), boxes, strict=True) if not box]
    actions = actions_of(env)
    return Shape(width, actions.options, any(boxes), tuple(raw), actions.components, space)


def actions_of(env: AnyEnv) -> Actions:
    """The conversion of choices to actions of ``env``.

    Raises:
        UsageError: Esper does not support the space, or it is too large.
    """
    space = acted_space(env)
    actions = Actions.of_space(space)
    if actions is None or not 0 < sum(actions.options) + actions.components <= MAX_OPTIONS:
        kinds = (
            "Box of floats with bounds, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple "
            f"of them, with at most {MAX_OPTIONS} options"
        )
        raise _refusal(env, "actions", space, kinds)
    return actions


def _refusal(env: AnyEnv, what: str, space: Any, kinds: str) -> UsageError:
    text = " ".join(str(space).split())
    return UsageError(
        f"gym: {what} of {_name(env)} are {text[:120]}; Esper takes {kinds}; wrap the environment"
    )


def _name(env: AnyEnv) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


class GymEnvironments(Environments):
    """Environments in this process, which take their steps in turns.

    Args:
        environments: environments of one task, not yet reset.
        seed, first, limit: see ``Environments``.

    Raises:
        UsageError: Esper does not support a space.
    """

    def __init__(
        self, environments: list[Env[Any, Any]], seed: int, first: int = 0, limit: int = 10**9
    ):
        shape, actions = shape_of(environments[0]), actions_of(environments[0])
        super().__init__(shape, actions, len(environments), seed, first, limit)
        self.environments = environments
        self._space = environments[0].observation_space
        self.episode = np.full(self.count, -1)
        self._history: list[list[list[float]]] = [[] for _ in environments]
        self._seeds: dict[int, list[int]] = {}

    def reset(self) -> None:
        """See ``Environments.reset``."""
        for i in range(self.count):
            self._begin(i, 0)

    def step(self, choices: Choices) -> None:
        """See ``Environments.step``."""
        self.ended = []
        actions, over = self.actions.of(choices), self.over.tolist()
        for i, (choice, action) in enumerate(zip(choices.tolist(), actions, strict=True)):
            if over[i]:
                self._begin(i, int(self.episode[i]) + 1)
            else:
                self._advance(i, choice, action)

    def close(self) -> None:
        """See ``Environments.close``."""
        for environment in self.environments:
            environment.close()

    def _begin(self, i: int, episode: int) -> None:
        self.episode[i] = episode
        self._history[i].clear()
        try:
            observation, info = self.environments[i].reset(seed=self._seed_of(i, episode))
        except Exception as error:
            name = type(error).__name__
            raise self._fault(i, f"raised {name}: {first_line(error)}") from error
        self.reward[i] = self.returns[i] = self.lengths[i] = 0
        self.terminated[i] = self.truncated[i] = self.over[i] = False
        self._store(i, observation, info)

    def _seed_of(self, i: int, episode: int) -> int:
        """The seed of an episode; drawn for all environments, as a draw costs as much for one."""
        if episode not in self._seeds:
            earliest = self.episode.min()
            self._seeds = {n: bits for n, bits in self._seeds.items() if n >= earliest}
            key = self.seed, self.identities, Purpose.GYM_RESET, episode, 0, 1
            self._seeds[episode] = random_bits(*key)[:, 0].tolist()
        return self._seeds[episode][i]

    def _advance(self, i: int, choice: list[float], action: Any) -> None:
        try:
            result = self.environments[i].step(action)
        except Exception as error:
            name = type(error).__name__
            raise self._fault(i, f"raised {name}: {first_line(error)}") from error
        if not isinstance(result, tuple) or len(result) != len(RESULT):
            count = len(result) if isinstance(result, tuple) else 1
            raise self._fault(i, f"returned {count} values, not {', '.join(RESULT)}")
        observation, reward, terminated, truncated, info = result
        self._history[i].append(choice)
        self.lengths[i] = length = len(self._history[i])
        truncated = truncated or length >= self.limit
        self.reward[i] = reward
        self.returns[i] += float(reward)
        self.terminated[i], self.truncated[i] = terminated, truncated
        self._store(i, observation, info)
        if terminated or truncated:
            self.over[i] = True
            self.ended.append(
                Episode(int(self.identities[i]), float(self.returns[i]), length, bool(terminated))
            )

    def _store(self, i: int, observation: Any, info: dict[str, Any]) -> None:
        """Store an observation and its action mask.

        Raises:
            UsageError: the mask is invalid.
        """
        try:
            features = features_of(self._space, observation)
        except Exception as error:
            raise self._fault(i, f"does not observe {self._space}: {first_line(error)}") from error
        if features.shape != self._features[i].shape:
            shape = np.shape(observation)
            raise self._fault(i, f"observes shape {shape}, which is not {self._space}")
        self._features[i] = features
        over = self.terminated[i] or self.truncated[i]
        # No action is chosen in a final state, where some environments allow no option at all.
        mask = None if over else info.get("action_mask")
        try:
            self.actions.write_mask(mask, self._masks[i])
        except (ValueError, TypeError) as error:
            raise UsageError(f"gym: action_mask of environment {i} {error}") from error

    def _fault(self, i: int, what: str) -> UsageError:
        step = len(self._history[i])
        return UsageError(f"gym: environment {i} {what}, after {step} steps of an episode")

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Episode numbers, actions of the current episodes and their last observations."""
        columns = len(self.actions.options) + self.actions.components
        dtype = torch.float32 if self.actions.components else torch.int64
        choices = [choice for history in self._history for choice in history]
        return {
            "episode": torch.from_numpy(self.episode).clone(),
            "lengths": torch.tensor([len(history) for history in self._history]),
            "actions": torch.tensor(choices, dtype=dtype).view(-1, columns),
            "features": self.observation.features.clone(),
            "masks": self.observation.masks.clone(),
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See ``Environments.load``."""
        lengths = state["lengths"].tolist()
        if len(lengths) != self.count or state["features"].shape != self._features.shape:
            raise ValueError("the environments differ")
        choices = state["actions"]
        actions = zip(choices.tolist(), self.actions.of(choices.numpy()), strict=True)
        for i, (episode, length) in enumerate(zip(state["episode"].tolist(), lengths, strict=True)):
            self._begin(i, episode)
            for _ in range(length):
                choice, action = next(actions)
                if self.over[i]:
                    raise mismatch(i)
                self._advance(i, choice, action)
            self._compare(i, state)


def make(name: str, arguments: dict[str, Any], count: int) -> list[Env[Any, Any]]:
    """Create ``count`` environments of the Gymnasium id ``name``.

    Raises:
        UsageError: there is no such id, its module has not been imported (``plugins.load_all``),
            or the environment cannot be created.
    """
    with _creating(name):
        spec = gymnasium.registry.get(name.rpartition(":")[2])
        if spec is not None and spec.entry_point is None:
            raise UsageError(f"gym: {name} exists only as a VectorEnv; give --vectorization vector")
        return [gymnasium.make(name, disable_env_checker=True, **arguments) for _ in range(count)]


def make_vector(name: str, arguments: dict[str, Any], count: int) -> VectorEnv[Any, Any, Any]:
    """Create the ``VectorEnv`` of the Gymnasium id ``name``, of ``count`` environments.

    Raises:
        UsageError: see ``make``.
    """
    with _creating(name):
        mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        return gymnasium.make_vec(name, count, vectorization_mode=mode, **arguments)


@contextmanager
def _creating(name: str) -> Iterator[None]:
    if not is_imported(name):
        NOTHING.check((), name, "a setting")
    try:
        yield
    except UsageError:
        raise
    except gymnasium.error.UnregisteredEnv as error:
        otherwise = "give the id of a registered one, or module:id"
        hint = suggestion(name, gymnasium.registry, otherwise, cutoff=0.5)
        raise UsageError(f"gym: there is no environment {name!r}; {hint}") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"gym: {name} cannot be created ({reason})") from error
