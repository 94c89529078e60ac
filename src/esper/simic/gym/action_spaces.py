"""Action spaces: what a policy chooses, as actions of the environment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Choices = NDArray[Any]
"""One row for each environment: an option of every head, then one number for every component of a
Box, unbounded, ``[N, heads + components]``."""


@dataclass(frozen=True, slots=True)
class Part:
    """A space within an action space that has no parts itself.

    Attributes:
        space: the space.
        begin, end: its columns of ``Choices``.
        starts: smallest value of each of its heads.
    """

    space: spaces.Space[Any]
    begin: int
    end: int
    starts: tuple[int, ...]

    def values(self, choices: Choices) -> Sequence[Any]:
        """The value of every environment."""
        if isinstance(self.space, spaces.Discrete):
            (start,) = self.starts
            return [int(choice) + start for choice in choices[:, self.begin].tolist()]
        columns = choices[:, self.begin : self.end]
        if isinstance(self.space, spaces.Box):
            values = to_bounds(columns, self.space.low.reshape(-1), self.space.high.reshape(-1))
        else:
            values = columns.astype(np.int64) + np.array(self.starts)
        assert self.space.shape is not None
        values = values.reshape(len(values), *self.space.shape)
        return list(values.astype(self.space.dtype, copy=False))


@dataclass(frozen=True, slots=True)
class Actions:
    """Conversion of choices to actions.

    Attributes:
        space: the action space.
        options: number of options of each head.
        components: number of components of all Boxes.
        parts: the spaces of which it is made.
    """

    space: spaces.Space[Any]
    options: tuple[int, ...]
    components: int
    parts: tuple[Part, ...]

    @classmethod
    def of_space(cls, space: spaces.Space[Any]) -> "Actions | None":
        """The conversion for a space; None if it is of another kind, or without bounds."""
        simple = list(leaves(space))
        if not all(map(_is_chosen, simple)):
            return None
        options = tuple(n for leaf in simple for n in options_of(leaf))
        heads, components, parts = 0, 0, []
        for leaf in simple:
            box = isinstance(leaf, spaces.Box)
            begin = len(options) + components if box else heads
            count = spaces.flatdim(leaf) if box else len(options_of(leaf))
            heads, components = (heads, components + count) if box else (heads + count, components)
            parts.append(Part(leaf, begin, begin + count, starts_of(leaf)))
        return cls(space, options, components, tuple(parts))

    @property
    def starts(self) -> tuple[int, ...]:
        """Smallest value of each head."""
        return tuple(start for part in self.parts for start in part.starts)

    @property
    def bounds(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Lowest and highest value of each component, ``[components]``."""
        boxes = [part.space for part in self.parts if isinstance(part.space, spaces.Box)]
        ends = ([box.low.reshape(-1) for box in boxes], [box.high.reshape(-1) for box in boxes])
        low, high = (np.concatenate([np.zeros(0), *each]) for each in ends)
        return low, high

    def of(self, choices: Choices) -> Sequence[Any]:
        """The environments' actions."""
        values = [part.values(choices) for part in self.parts]
        if not isinstance(self.space, spaces.Dict | spaces.Tuple):
            return values[0]
        return [_assembled(self.space, iter(row)) for row in zip(*values, strict=True)]

    def write_mask(self, mask: Any, rows: Bools) -> None:
        """Write an environment's ``action_mask`` to ``rows [heads, widest]``.

        Args:
            mask: ``[n]`` for Discrete; for several heads one such array per head, or all of them
                concatenated. Values above 0 are legal. None makes every option legal.
            rows: bool ``[heads, widest]``, overwritten.

        Raises:
            ValueError: the mask has another shape, or leaves a head without a legal option.
        """
        if mask is None:
            rows[:] = _all_legal(self.options)
            return
        rows[:] = False
        parts = self._mask_parts(mask)
        for row, part, count in zip(rows, parts, self.options, strict=True):
            if part.shape != (count,):
                raise ValueError(f"has a part of shape {part.shape} for {count} options")
            row[:count] = part
        if not rows.any(1).all():
            raise ValueError(f"leaves action {int(rows.any(1).argmin())} without an option")

    def _mask_parts(self, mask: Any) -> list[Any]:
        if isinstance(mask, tuple | list) and len(self.options) > 1:
            if len(mask) != len(self.options):
                raise ValueError(f"has {len(mask)} parts for {len(self.options)} actions")
            return [np.asarray(part) > 0 for part in mask]
        flat = np.asarray(mask).reshape(-1) > 0
        if len(flat) != sum(self.options):
            raise ValueError(f"has {len(flat)} numbers, not {sum(self.options)}")
        return np.split(flat, np.cumsum(self.options)[:-1]) if self.options else []


def to_bounds(numbers: Choices, low: NDArray[Any], high: NDArray[Any]) -> NDArray[Any]:
    """Components of a Box from unbounded numbers, ``[..., components]``."""
    # torch's tanh, as in an exported policy: that of numpy rounds differently.
    tanh = torch.from_numpy(numbers).tanh().numpy()
    return np.clip(low + (tanh + 1.0) / 2.0 * (high - low), low, high)


@cache
def _all_legal(options: tuple[int, ...]) -> Bools:
    """The mask in which every option is legal, for heads with ``options``, ``[heads, widest]``."""
    mask = np.arange(max(options, default=1)) < np.array(options, np.int64)[:, None]
    mask.flags.writeable = False
    return mask


def options_of(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Number of options of each head of a space without parts; none of a Box."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(space.nvec.reshape(-1).tolist())
    return (2,) * spaces.flatdim(space) if isinstance(space, spaces.MultiBinary) else ()


def starts_of(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Smallest value of each head of a space without parts."""
    if isinstance(space, spaces.Discrete):
        return (int(space.start),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(space.start.reshape(-1).tolist())
    return (0,) * len(options_of(space))


def leaves(space: spaces.Space[Any]) -> Iterator[spaces.Space[Any]]:
    """The spaces without parts of which a space is made, in the order of Gymnasium."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            yield from leaves(part)
    else:
        yield space


def _is_chosen(space: spaces.Space[Any]) -> bool:
    """Whether a policy can choose from a space without parts."""
    if isinstance(space, spaces.Box):
        return space.is_bounded() and np.dtype(space.dtype).kind == "f"
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def _assembled(space: spaces.Space[Any], values: Iterator[Any]) -> Any:
    """A value of a space with parts; ``values`` are those of the parts."""
    if isinstance(space, spaces.Dict):
        return {name: _assembled(part, values) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_assembled(part, values) for part in space.spaces)
    return next(values)
