"""Gymnasium's spaces as tensors: observations are flat features, actions one integer per head."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from gymnasium import Env, spaces
from numpy.typing import NDArray

from esper.leyline.errors import UsageError

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]

MAX_FEATURES = 1_000_000
MAX_OPTIONS = 100_000


@dataclass(frozen=True, slots=True)
class Features:
    """Conversion of observations to features.

    Attributes:
        width: number of features of an observation.
        categories: number of values of each component of a discrete observation; empty for a Box.
        starts: smallest value of each of these components.
    """

    width: int
    categories: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether features are quantities, which are normalised, rather than one-hot."""
        return not self.categories

    def write(self, observation: Any, row: Floats) -> None:
        """Write ``observation``, as its values or one-hot encoded, to ``row [width]``."""
        if self.measured:
            row[:] = np.asarray(observation).reshape(-1)
            return
        row[:] = 0.0
        begin = 0
        numbers = np.asarray(observation).reshape(-1).tolist()
        for number, count, start in zip(numbers, self.categories, self.starts, strict=True):
            row[begin + number - start] = 1.0
            begin += count


@dataclass(frozen=True, slots=True)
class Actions:
    """Conversion of the heads' choices to actions.

    Attributes:
        options: number of options of each head.
        starts: smallest value of each component of an action.
        shape: shape of an action in the environment; None for a single integer.
    """

    options: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...] | None

    @property
    def widest(self) -> int:
        """Number of options of the widest head."""
        return max(self.options)

    def of(self, choices: Integers) -> Sequence[Any]:
        """The environments' actions for the choices ``[N, heads]``."""
        actions = choices + np.array(self.starts)
        if self.shape is None:
            return list(actions[:, 0].tolist())
        return list(actions.reshape(len(actions), *self.shape))

    def write_mask(self, mask: Any, rows: Bools) -> None:
        """Write an environment's ``action_mask`` to ``rows [heads, widest]``.

        Args:
            mask: ``[n]`` for Discrete; for MultiDiscrete one such array per head, or all of them
                concatenated. Values above 0 are legal. None makes every option legal.
            rows: bool ``[heads, widest]``, overwritten.

        Raises:
            ValueError: the mask has another shape, or leaves a head without a legal option.
        """
        if mask is None:
            rows[:] = _all_legal(self.options)
            return
        rows[:] = False
        parts = self._parts(mask)
        for row, part, count in zip(rows, parts, self.options, strict=True):
            if part.shape != (count,):
                raise ValueError(f"has a part of shape {part.shape} for {count} options")
            row[:count] = part
        if not rows.any(1).all():
            raise ValueError(f"leaves action {int(rows.any(1).argmin())} without an option")

    def _parts(self, mask: Any) -> list[Any]:
        if isinstance(mask, tuple | list) and len(self.options) > 1:
            if len(mask) != len(self.options):
                raise ValueError(f"has {len(mask)} parts for {len(self.options)} actions")
            return [np.asarray(part) > 0 for part in mask]
        flat = np.asarray(mask).reshape(-1) > 0
        if len(flat) != sum(self.options):
            raise ValueError(f"has {len(flat)} numbers, not {sum(self.options)}")
        return np.split(flat, np.cumsum(self.options)[:-1])


@cache
def _all_legal(options: tuple[int, ...]) -> Bools:
    """The mask in which every option is legal, for heads with ``options``, ``[heads, widest]``."""
    mask = np.arange(max(options)) < np.array(options)[:, None]
    mask.flags.writeable = False
    return mask


def features_of(env: Env[Any, Any]) -> Features:
    """The conversion of the observations of ``env`` to features.

    Raises:
        UsageError: the space is not a Box, Discrete or MultiDiscrete, or is too large.
    """
    space = env.observation_space
    if isinstance(space, spaces.Box):
        return _features_within_limit(env, Features(int(np.prod(space.shape))))
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        categories, starts = _categories(space)
        return _features_within_limit(env, Features(sum(categories), categories, starts))
    raise _refusal(env, "observations", space)


def actions_of(env: Env[Any, Any]) -> Actions:
    """The conversion of choices to actions of ``env``.

    Raises:
        UsageError: the space is not a Discrete or MultiDiscrete, or is too large.
    """
    space = env.action_space
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        options, starts = _categories(space)
        shape = None if isinstance(space, spaces.Discrete) else space.shape
        if 0 < sum(options) <= MAX_OPTIONS:
            return Actions(options, starts, shape)
    raise _refusal(env, "actions", space)


def _categories(
    space: spaces.Discrete | spaces.MultiDiscrete,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of values and the smallest value of each component of a space."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),), (int(space.start),)
    return tuple(space.nvec.reshape(-1).tolist()), tuple(space.start.reshape(-1).tolist())


def _features_within_limit(env: Env[Any, Any], features: Features) -> Features:
    if not 1 <= features.width <= MAX_FEATURES:
        raise UsageError(
            f"gym: observations of {_name(env)} are {features.width} numbers; "
            f"Esper takes 1 to {MAX_FEATURES}"
        )
    return features


def _refusal(env: Env[Any, Any], what: str, space: Any) -> UsageError:
    kinds = f"Discrete or MultiDiscrete with at most {MAX_OPTIONS} options"
    if what == "observations":
        kinds = "Box, Discrete or MultiDiscrete"
    text = " ".join(str(space).split())
    return UsageError(
        f"gym: {what} of {_name(env)} are {text[:120]}; Esper takes {kinds}; wrap the environment"
    )


def _name(env: Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
