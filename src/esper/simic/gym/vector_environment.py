"""N Gymnasium environments in lockstep; each is reset in the step after its episode ends.

Observations are flat features; for actions see ``action_spaces``.

An episode is a function of its seed and its actions; its seed is a function of the run's seed, the
environment and the episode number. An environment is therefore saved as its episode number and the
actions taken in that episode, and is restored by replaying them. No pickle is needed.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Env, spaces
from numpy.typing import NDArray

from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.errors import UsageError, first_line, suggestion
from esper.runtime.gate import NOTHING
from esper.runtime.plugins import is_imported
from esper.simic.gym.action_spaces import Actions, Bools, Choices, leaves
from esper.tamiyo.policy.recurrent import FlatObservation

Floats = NDArray[np.float32]

MAX_FEATURES = 1_000_000
MAX_OPTIONS = 100_000
FLAT = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces without parts that can be observed."""
RESULT = ("observation", "reward", "terminated", "truncated", "info")
"""What ``step`` of an environment returns."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a policy's inputs and outputs.

    Attributes:
        inputs: number of features of an observation.
        options: number of options of each head.
        measured: whether some features are quantities, which are normalised.
        raw: first column of other features and the one after their last, in pairs.
        components: number of components of Box actions.
        space: the observation space; None where it is not known.
    """

    inputs: int
    options: tuple[int, ...]
    measured: bool
    raw: tuple[tuple[int, int], ...] = ()
    components: int = 0
    space: spaces.Space[Any] | None = field(default=None, compare=False)


def features_of(space: spaces.Space[Any], observation: Any) -> NDArray[Any]:
    """An observation as flat features: values of a Box, bits, one-hot options, one after another.

    Dict, Tuple and their parts are flattened as Gymnasium does.
    """
    if isinstance(space, spaces.Box):
        return np.asarray(observation).reshape(-1)
    return np.asarray(spaces.flatten(space, observation))


def shape_of(env: Env[Any, Any]) -> Shape:
    """The sizes of a policy that acts in ``env``.

    Raises:
        UsageError: Esper does not support one of the spaces, or it is too large.
    """
    space = env.observation_space
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


def actions_of(env: Env[Any, Any]) -> Actions:
    """The conversion of choices to actions of ``env``.

    Raises:
        UsageError: Esper does not support the space, or it is too large.
    """
    actions = Actions.of_space(env.action_space)
    if actions is None or not 0 < sum(actions.options) + actions.components <= MAX_OPTIONS:
        kinds = (
            "Box of floats with bounds, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple "
            f"of them, with at most {MAX_OPTIONS} options"
        )
        raise _refusal(env, "actions", env.action_space, kinds)
    return actions


def _refusal(env: Env[Any, Any], what: str, space: Any, kinds: str) -> UsageError:
    text = " ".join(str(space).split())
    return UsageError(
        f"gym: {what} of {_name(env)} are {text[:120]}; Esper takes {kinds}; wrap the environment"
    )


def _name(env: Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that ended.

    Attributes:
        environment: identity of its environment.
        episode_return: sum of its rewards, unnormalised.
        length: number of steps.
        terminated: whether the episode reached a terminal state rather than being truncated.
    """

    environment: int
    episode_return: float
    length: int
    terminated: bool


class GymEnvironments:
    """Environments of one task with their current observations.

    Args:
        environments: environments of one task, not yet reset.
        seed: seed of the run.
        first: identity of the first environment; those of the others follow.
        limit: steps after which an episode is truncated.

    Attributes:
        shape: sizes of a policy that acts in them.
        actions: conversion of choices to actions.
        identities: identities of the environments, int64 ``[N]``.
        observation: the current observations; overwritten by the next step.
        reward: rewards of the last step, float64 ``[N]``.
        terminated, truncated: whether the last step ended the episode, bool ``[N]``.
        over: environments whose episode has ended, bool ``[N]``: ``observation`` is their final
            one, and the next step only resets them.
        ended: episodes that ended in the last step.

    Raises:
        UsageError: Esper does not support a space.
    """

    def __init__(
        self, environments: list[Env[Any, Any]], seed: int, first: int = 0, limit: int = 10**9
    ):
        self.environments, self.seed, self.limit = environments, seed, limit
        self.identities = torch.arange(first, first + len(environments))
        self.shape, self.actions = shape_of(environments[0]), actions_of(environments[0])
        self._space = environments[0].observation_space
        count, options = len(environments), self.shape.options
        self._features: Floats = np.zeros((count, self.shape.inputs), dtype=np.float32)
        self._masks: Bools = np.zeros(
            (count, len(options), max(options, default=1)), dtype=np.bool_
        )
        self.observation = FlatObservation(
            torch.from_numpy(self._features), torch.from_numpy(self._masks)
        )
        self.reward, self._returns = np.zeros((2, count))
        self.terminated, self.truncated, self.over = np.zeros((3, count), dtype=np.bool_)
        self.episode = np.full(count, -1)
        self._history: list[list[list[float]]] = [[] for _ in environments]
        self.ended: list[Episode] = []

    @property
    def count(self) -> int:
        """Number of environments N."""
        return len(self.environments)

    def reset(self) -> None:
        """Begin the first episode of every environment."""
        for i in range(self.count):
            self._begin(i, 0)

    def step(self, choices: Choices) -> None:
        """Take one step in every environment; those that are ``over`` are reset instead.

        Args:
            choices: see ``Choices``.
        """
        self.ended = []
        actions, over = self.actions.of(choices), self.over.tolist()
        for i, (choice, action) in enumerate(zip(choices.tolist(), actions, strict=True)):
            if over[i]:
                self._begin(i, int(self.episode[i]) + 1)
            else:
                self._advance(i, choice, action)

    def close(self) -> None:
        """Close the environments."""
        for environment in self.environments:
            environment.close()

    def _begin(self, i: int, episode: int) -> None:
        bits = random_bits(self.seed, self.identities[i : i + 1], Purpose.GYM_RESET, episode, 0, 1)
        self.episode[i] = episode
        self._history[i].clear()
        try:
            observation, info = self.environments[i].reset(seed=int(bits))
        except Exception as error:
            name = type(error).__name__
            raise self._fault(i, f"raised {name}: {first_line(error)}") from error
        self.reward[i] = self._returns[i] = 0.0
        self.terminated[i] = self.truncated[i] = self.over[i] = False
        self._store(i, observation, info)

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
        truncated = truncated or len(self._history[i]) >= self.limit
        self.reward[i] = reward
        self._returns[i] += float(reward)
        self.terminated[i], self.truncated[i] = terminated, truncated
        self._store(i, observation, info)
        if terminated or truncated:
            self.over[i] = True
            self.ended.append(
                Episode(
                    int(self.identities[i]),
                    float(self._returns[i]),
                    len(self._history[i]),
                    bool(terminated),
                )
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
        """Episode numbers, actions taken and current observations, for the checkpoint."""
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
        """Restore ``state`` by replaying its actions.

        Raises:
            ValueError: the number of environments or of features differs.
            UsageError: an environment's observation differs from the saved one.
        """
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
                    raise _mismatch(i)
                self._advance(i, choice, action)
            features, reference = self._features[i], state["features"][i].numpy()
            same_masks = np.array_equal(self._masks[i], state["masks"][i].numpy())
            if features.tobytes() != reference.tobytes() or not same_masks:
                raise _mismatch(i)


def _mismatch(i: int) -> UsageError:
    return UsageError(
        f"resume: environment {i} did not reproduce its saved observation, because seed and "
        "actions do not determine the episodes of this task; start a new run"
    )


def make(name: str, arguments: dict[str, Any], count: int) -> list[Env[Any, Any]]:
    """Create ``count`` environments of the Gymnasium id ``name``.

    Raises:
        UsageError: there is no such id, its module has not been imported (``plugins.load_all``),
            or the environment cannot be created.
    """
    if not is_imported(name):
        NOTHING.check((), name, "a setting")
    try:
        return [gymnasium.make(name, disable_env_checker=True, **arguments) for _ in range(count)]
    except gymnasium.error.UnregisteredEnv as error:
        otherwise = "give the id of a registered one, or module:id"
        hint = suggestion(name, gymnasium.registry, otherwise, cutoff=0.5)
        raise UsageError(f"gym: there is no environment {name!r}; {hint}") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"gym: {name} cannot be created ({reason})") from error
