"""Putting what several shards say together into one answer in the order of the environments."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_UNKNOWN = frozenset(
    {
        "contribution",
        "health",
        "previous_health",
        "gradient_norm",
        "gradient_ratio",
        "baseline",
        "improvement",
        "birth_accuracy",
        "shapley",
        "interactions",
    }
)
"""Fields in which a slot that a host does not have is NaN; it is 0 or false elsewhere."""


def merged(parts: Sequence[Any], order: Tensor, name: str = "") -> Any:
    """One value from those of the shards, rows picked by ``order``.

    Args:
        parts: of each shard the same dataclass, tensor ``[n, ...]`` or value; hosts with fewer
            slots are padded up to the widest.
        order: int64 ``[N]``, which row of the shards' rows, one after another, comes where; on the
            device to which all is brought.
        name: of the field.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        parts = [part.to(order.device) for part in parts]
        return _stacked(parts, float("nan") if name in _UNKNOWN else 0.0).index_select(0, order)
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{
                f.name: merged([getattr(part, f.name) for part in parts], order, f.name)
                for f in fields(first)
            }
        )
    return first


def _stacked(parts: Sequence[Tensor], fill: float) -> Tensor:
    """The parts one after another, each padded at its end in every other axis."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    if all(list(part.shape[1:]) == shape for part in parts):
        return torch.cat(list(parts))
    wide = []
    for part in parts:
        padding = [
            x for size, most in zip(part.shape[1:], shape, strict=True) for x in (most - size, 0)
        ]
        value = fill if part.is_floating_point() else 0
        wide.append(torch.nn.functional.pad(part, padding[::-1], value=value))
    return torch.cat(wide)
