"""What travels between the learner and its actors: nested values whose tensors are numpy arrays."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_arrays(value: Any) -> Any:
    """``value`` with every tensor as an array of its own memory.

    Args:
        value: tensors on any device, other values, and dictionaries, tuples, lists and dataclasses
            of such.
    """
    return _map(value, lambda x: x.detach().cpu().numpy().copy(), Tensor)


def as_tensors(value: Any) -> Any:
    """The inverse of ``as_arrays``, on the CPU. Copies: what ray delivers is read-only."""
    return _map(value, lambda x: torch.from_numpy(x.copy()), np.ndarray)


def on_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor on ``device``."""
    return _map(value, lambda x: x.to(device), Tensor)


def size_of(value: Any) -> int:
    """Bytes of all arrays in ``value``."""
    sizes: list[int] = []
    _map(value, lambda x: sizes.append(x.nbytes), np.ndarray)
    return sum(sizes)


def stack(values: list[Any]) -> Any:
    """One value of the type of ``values``, whose tensors are theirs stacked along axis 1.

    A part that is None at first and known in the last steps has only those along axis 1; one that
    is always None is None. Values that are no tensors are taken from the last.

    Args:
        values: a dataclass of tensors ``[N, ...]`` and such dataclasses for each step.
    """
    items = [value for value in values if value is not None]
    if not items:
        return None
    assert all(value is not None for value in values[-len(items) :]), "known only for a while"
    first = items[0]
    if isinstance(first, Tensor):
        return torch.stack(items, 1)
    if is_dataclass(first) and not isinstance(first, type):
        parts = {f.name: stack([getattr(v, f.name) for v in items]) for f in fields(first)}
        return type(first)(**parts)
    return items[-1]


def element(value: Any, step: int, steps: int) -> Any:
    """The value of ``step``, from 0, of the ``steps`` values from which ``value`` was stacked."""
    if isinstance(value, Tensor):
        index = step - (steps - value.shape[1])
        return value[:, index] if index >= 0 else None
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: element(getattr(value, f.name), step, steps) for f in fields(value)}
        # A part that is not known yet has no tensor at all.
        return type(value)(**parts) if any(x is not None for x in parts.values()) else None
    return value


def _map(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """``value`` with ``change`` applied to each of its parts of type ``kind``."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {name: _map(part, change, kind) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(part, change, kind) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _map(getattr(value, f.name), change, kind) for f in fields(value)}
        return type(value)(**parts)
    return value
