"""Small constant tensors, created once per device."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.transfer import moved

Kinds = tuple["type | Kinds", ...]


def cached_tensor(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """``torch.tensor(values)`` on ``device``, the same tensor in every call; never write to it.

    Creating it in every call would copy it in every call.
    """
    if torch.compiler.is_compiling():
        # A constant of the graph; the compiler would trace through the cache with a warning.
        return torch.tensor(values, device=device)
    return _tensor(values, _kinds(values), device)


@cache
def _tensor(values: tuple[Any, ...], kinds: Kinds, device: torch.device) -> Tensor:
    """Tensor of ``values``; ``kinds`` distinguishes (True,), (1,) and (1.0,), which are equal."""
    # An inference tensor could not take part in autograd.
    with torch.inference_mode(False):
        return moved(torch.tensor(values), device)


def _kinds(values: tuple[Any, ...]) -> Kinds:
    """The types of the values, nested like the values."""
    return tuple([_kinds(x) if isinstance(x, tuple) else type(x) for x in values])


class Table:
    """A constant lookup table, created once per device."""

    def __init__(self, values: Sequence[Any]):
        self._values = values
        self._tensors: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The whole table; never write to it."""
        if device not in self._tensors:
            with torch.inference_mode(False):
                self._tensors[device] = moved(torch.tensor(self._values), device)
        return self._tensors[device]

    def __getitem__(self, index: Tensor | tuple[Tensor, ...]) -> Tensor:
        """The entries at ``index``."""
        if isinstance(index, tuple):
            return self.on(index[0].device)[index]
        table = self.on(index.device)
        return table.take(index) if table.ndim == 1 else table[index]
