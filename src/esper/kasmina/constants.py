"""Small constant tensors, made once for each device."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

Kinds = tuple["type | Kinds", ...]


def constant(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """``torch.tensor(values)`` on ``device``, the same tensor at every call; never write to it.

    Made anew each time it would be a copy from pageable memory, for which a CUDA stream waits.
    """
    return _made(values, _kinds(values), device)


@cache
def _made(values: tuple[Any, ...], kinds: Kinds, device: torch.device) -> Tensor:
    """The tensor of ``values``. ``kinds`` keep (True,), (1,) and (1.0,) apart, which are equal."""
    return torch.tensor(values, device=device)


def _kinds(values: tuple[Any, ...]) -> Kinds:
    """The types of the numbers, nested as they are."""
    return tuple([_kinds(x) if isinstance(x, tuple) else type(x) for x in values])
