"""Small constant tensors, made once for each device."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Kinds = tuple["type | Kinds", ...]


def cached_tensor(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """``torch.tensor(values)`` on ``device``, the same tensor at every call; never write to it.

    Made anew each time it would be a copy from pageable memory, for which a CUDA stream waits.
    """
    return _made(values, _kinds(values), device)


@cache
def _made(values: tuple[Any, ...], kinds: Kinds, device: torch.device) -> Tensor:
    """The tensor of ``values``. ``kinds`` keep (True,), (1,) and (1.0,) apart, which are equal."""
    # Not one of inference mode, from which no gradient may be taken.
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def _kinds(values: tuple[Any, ...]) -> Kinds:
    """The types of the numbers, nested as they are."""
    return tuple([_kinds(x) if isinstance(x, tuple) else type(x) for x in values])


class Table:
    """A constant tensor that is looked into, made once for each device."""

    def __init__(self, values: Sequence[Any]):
        self._values = values
        self._made: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The whole table; never write to it."""
        if device not in self._made:
            with torch.inference_mode(False):
                self._made[device] = torch.tensor(self._values, device=device)
        return self._made[device]

    def __getitem__(self, index: Tensor | tuple[Tensor, ...]) -> Tensor:
        """What stands at ``index``."""
        first = index[0] if isinstance(index, tuple) else index
        return self.on(first.device)[index]
