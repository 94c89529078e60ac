"""Merging the results of several shards into one in the order of the environments."""

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
"""Fields padded with NaN for slots that a host does not have; others with 0 or false."""


def merge(parts: Sequence[Any], order: Tensor, name: str = "") -> Any:
    """Merge the shards' values into one, with the rows in the given order.

    Args:
        parts: the value of each shard: dataclasses of one type, tensors ``[n, ...]``, or other
            values, of which the first is taken. Tensors of hosts with fewer slots are padded to the
            widest.
        order: for each row of the result, its index in the concatenated rows of the shards, int64
            ``[N]``; the result is on its device.
        name: name of the field, which selects the padding.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        parts = [part.to(order.device) for part in parts]
        return _stack(parts, float("nan") if name in _UNKNOWN else 0.0).index_select(0, order)
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{
                f.name: merge([getattr(part, f.name) for part in parts], order, f.name)
                for f in fields(first)
            }
        )
    return first


def _stack(parts: Sequence[Tensor], fill: float) -> Tensor:
    """The parts concatenated along the first axis, padded at the end of every other axis."""
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
