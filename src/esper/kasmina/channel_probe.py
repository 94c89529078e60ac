"""Where the channels of an activation lie in what a function makes of it, tried with other values
in one channel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.nested import map_leaves, tensors

NO_AXIS = -1
"""Of an output in which there are no channels, such as the lengths of packed sequences."""
MOST_GATES = 6
"""Parts of a layer's rows that may hold the same channels: scales, shifts and gates of a block."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where channels lie in a tensor.

    Attributes:
        axis: the axis.
        block: entries side by side that belong to one channel.
        gates: how many times all of the channels lie on the axis, one after the other.
    """

    axis: int
    block: int = 1
    gates: int = 1

    def coarse(self, factor: int) -> "Position":
        """The position of channels that are so many of these."""
        return replace(self, block=factor * self.block)


def positions(
    func: Any, args: Any, kwargs: Any, sources: Sequence[tuple[Tensor, Position]], channels: int
) -> list[Position | None]:
    """Where the channels lie in each output of a function; None where it mixes them.

    Other values in one channel of the inputs must change that channel of the output alone. An
    output that they do not change has no axis of them; if none changes, the list is empty.

    Args:
        func: the function.
        args, kwargs: its arguments.
        sources: those that have the channels, and where.
        channels: number of channels.
    """
    generator = torch.Generator().manual_seed(0)
    # Of either sign, so that no activation function maps both to the same value.
    draws = (torch.randn(x.shape, generator=generator).abs() for x, _ in sources)
    bases = [draw.to(x.device, x.dtype) for draw, (x, _) in zip(draws, sources, strict=True)]

    def outputs(values: Sequence[Tensor]) -> list[Tensor]:
        def swap(each: Any) -> Any:
            pairs = zip(values, sources, strict=True)
            # The function may work in place.
            return next((v for v, (x, _) in pairs if x is each), each).clone()

        return list(tensors(func(*map_leaves(args, swap), **map_leaves(kwargs, swap))))

    reference = outputs(bases)
    fits = [list(_all_positions(y.shape, sources, channels)) for y in reference]
    has_changed = [False for _ in reference]
    for channel in sorted({0, channels // 2, channels - 1}):
        values = []
        for base, (x, position) in zip(bases, sources, strict=True):
            entries = torch.arange(x.shape[position.axis]) // position.block % channels == channel
            shape = [-1 if axis == position.axis else 1 for axis in range(x.ndim)]
            values.append(
                torch.where(entries.view(shape).to(base.device), _perturbation(base), base)
            )
        changes = [a != b for a, b in zip(outputs(values), reference, strict=True)]
        has_changed = [x or bool(y.any()) for x, y in zip(has_changed, changes, strict=True)]
        fits = [
            [each for each in fit if _is_alone(change, each, channel, channels)]
            for fit, change in zip(fits, changes, strict=True)
        ]
        if any(has_changed) and not any(fits):
            break
    if not any(has_changed):
        return []
    first = (fit[0] if fit else None for fit in fits)
    return [y if x else Position(NO_AXIS) for x, y in zip(has_changed, first, strict=True)]


def units_behind(
    func: Any, args: Any, kwargs: Any, x: Tensor, position: Position, channels: int, gates: int
) -> list[tuple[int, int]]:
    """Units of several rows of a layer that a function keeps apart which mixes its rows.

    Args:
        func: the function.
        args, kwargs: its arguments.
        x: that of the arguments which has the rows, as the layer wrote them.
        position: where the units lie in it by which the function mixes them.
        channels: number of these units.
        gates: of each, of which ``x`` may have one.

    Returns:
        gates of the unit, and rows side by side in each, as a ``Position`` has them.
    """
    copies = map_leaves(args, torch.clone), map_leaves(kwargs, torch.clone)
    numbers = [*args, *(n for y in tensors(func(*copies[0], **copies[1])) for n in y.shape)]
    sizes = {n for n in numbers if type(n) is int and n > 1}  # a group norm takes its groups
    units = []
    for parts in range(1, MOST_GATES + 1) if gates == 1 else (1,):
        for count in sorted(sizes, reverse=True):
            rows, remainder = divmod(channels, parts * count)
            if remainder or not rows or count == channels:
                continue
            start = Position(position.axis, rows * position.block, parts * position.gates)
            if None not in positions(func, args, kwargs, [(x, start)], count):
                units.append((parts * gates, start.block))
    return units


def _perturbation(values: Tensor) -> Tensor:
    """Other values, of a tensor that has none below 0."""
    if values.dtype == torch.bool:
        return ~values
    return -values.flip(0) if values.is_floating_point() else -1 - values


def _all_positions(
    shape: torch.Size, sources: Sequence[tuple[Tensor, Position]], channels: int
) -> Iterator[Position]:
    """Where so many channels may lie in an output."""
    axes = list(range(len(shape)))
    if channels == 1:
        # Every axis holds one block.
        axes = [position.axis for x, position in sources if x.shape == shape][:1]
    for axis in axes:
        several = {position.gates for _, position in sources}
        # Flattened sequences have them once per step.
        several |= {shape[axis] // channels // position.block for _, position in sources}
        for gates in sorted({1, *several} - {0}):
            block, remainder = divmod(shape[axis], gates * channels)
            if block and not remainder:
                yield Position(axis, block, gates)


def _is_alone(change: Tensor, position: Position, channel: int, channels: int) -> bool:
    """Whether the entries of an output that changed are all of one channel."""
    crossing = [axis for axis in range(change.ndim) if axis != position.axis]
    entries = (change.any(crossing) if crossing else change).nonzero()[:, 0]
    return len(entries) > 0 and bool((entries // position.block % channels == channel).all())
