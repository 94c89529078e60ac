"""Copies between CPU and device for which neither waits too long, and constants on the device."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
Kinds = tuple["type | Kinds", ...]


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Copy ``x`` from the CPU to ``device``.

    A copy from pageable memory would block a CUDA stream, so the copy uses pinned memory.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def moved_together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors ``[n]`` of one dtype from the CPU to ``device``, in one transfer."""
    if device.type != "cuda" or not parts:
        return list(parts)
    return list(moved(torch.cat(list(parts)), device).split([len(part) for part in parts]))


class HostCopy:
    """Copies of tensors in CPU memory, which arrive while the device computes on.

    The tensors of a device are packed into one buffer there, so that one transfer brings them all.
    Tensors on the CPU are not copied.

    Args:
        tensors: all on one device; they may change after the call.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = list(tensors)
        self._arrival: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type != "cuda":
            return
        device = tensors[0].device
        # Sorted by size, every part begins at a multiple of the size of its elements.
        self._order = sorted(range(len(tensors)), key=lambda i: -tensors[i].dtype.itemsize)
        # Expanded tensors have a stride of 0, which cannot be viewed as bytes.
        parts = [tensors[i].reshape(-1).contiguous().view(torch.uint8) for i in self._order]
        self._sizes = [len(part) for part in parts]
        self._packed = torch.cat(parts).to("cpu", non_blocking=True)
        self._kinds = [(x.dtype, x.shape) for x in tensors]
        self._tensors = []
        self._arrival = torch.cuda.Event()
        self._arrival.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """The tensors in CPU memory, in the order of the arguments; waits until they are there."""
        if self._arrival is None:
            return self._tensors
        self._arrival.synchronize()
        tensors: dict[int, Tensor] = {}
        for i, part in zip(self._order, self._packed.split(self._sizes), strict=True):
            dtype, shape = self._kinds[i]
            tensors[i] = part.view(dtype).view(shape)
        return [tensors[i] for i in range(len(self._kinds))]


def on_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors in CPU memory: themselves if they are there, else copies, in one transfer."""
    return HostCopy(tensors).wait()


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
