"""The structures of ``src/calls.h``, and the library's functions for one dtype."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.mlp import MlpHost
from esper.tolaria.backends.native.build import library

SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}
STEPS = ("input", "block", "slot", "pool", "head")
_OUT_OF_MEMORY, _FAILED = 1, 2


class HostSpec(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int32) for name in ("height", "width", "channels", "classes", "kernel")),
        *((name, c_int32) for name in ("steps", "slots")),
        *((name, POINTER(c_int32)) for name in ("program", "block_channels")),
        *((name, POINTER(c_int32)) for name in ("slot_channels", "slot_width", "gate_offset")),
    ]


class TrainCall(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "batches", "batch_size")),
        *((name, c_void_p) for name in ("host", "host_first", "host_second", "host_step")),
        ("buffers", c_void_p),
        *((name, c_void_p) for name in ("seed", "seed_first", "seed_second", "seed_step")),
        *((name, c_void_p) for name in ("kind", "form", "alpha", "frozen")),
        *((name, c_void_p) for name in ("images", "labels", "drawn", "poses")),
        ("reach", c_int64),
        *((name, c_void_p) for name in ("host_rate", "seed_rate")),
        *((name, c_double) for name in ("weight_decay", "momentum", "most_norm")),
        ("rule", c_int32),
        ("tensor_counts", c_void_p),
        *((name, c_void_p) for name in ("loss", "accuracy", "host_norm", "seed_norm")),
        ("tensor_norms", c_void_p),
    ]


class EvaluateCall(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "images", "lanes", "chunks")),
        *((name, c_void_p) for name in ("host", "buffers", "seed", "row")),
        *((name, c_void_p) for name in ("kind", "form", "alpha")),
        *((name, c_void_p) for name in ("packed", "labels", "dataset")),
        *((name, c_void_p) for name in ("variants", "start", "variant_alpha")),
        *((name, c_void_p) for name in ("scores", "variant_scores")),
    ]


class Library:
    """The functions for one dtype."""

    def __init__(self, dtype: torch.dtype):
        found, suffix = library(), SUFFIXES[dtype]

        def function(name: str, result: type | None, *arguments: type) -> "ctypes._FuncPointer":
            pointer = getattr(found, f"esper_{name}_{suffix}")
            pointer.restype, pointer.argtypes = result, arguments
            return pointer

        self.lanes: int = function("lanes", ctypes.c_int)()
        self.create = function("create", c_void_p, POINTER(HostSpec), ctypes.c_int)
        self.destroy = function("destroy", None, c_void_p)
        self.sizes = function("sizes", None, c_void_p, ctypes.c_int, ctypes.c_int, POINTER(c_int32))
        self.train = checked(function("train", ctypes.c_int, c_void_p, POINTER(TrainCall)))
        self.evaluate = checked(function("evaluate", ctypes.c_int, c_void_p, POINTER(EvaluateCall)))


def checked(function: "ctypes._FuncPointer") -> "ctypes._FuncPointer":
    """``function`` with an exception where its result is not 0."""

    def check(result: Any, _: Any, __: Any) -> Any:
        if result == _OUT_OF_MEMORY:
            raise MemoryError("the native backend ran out of memory")
        if result == _FAILED:
            raise RuntimeError("the native backend failed")
        return result

    function.errcheck = check
    return function


def host_spec(host: CnnHost | MlpHost) -> HostSpec:
    """What the library has to know of a host."""
    height, width, channels = host.image
    blocks, kernel = (host.channels, host.kernel) if isinstance(host, CnnHost) else (host.widths, 0)
    program = [(STEPS.index(kind), number) for kind, number in host.program]
    return HostSpec(
        height=height,
        width=width,
        channels=channels,
        classes=host.classes,
        kernel=kernel,
        steps=len(program),
        slots=len(host.slots),
        program=_integers([number for pair in program for number in pair]),
        block_channels=_integers(blocks),
        slot_channels=_integers([slot.channels for slot in host.slots]),
        slot_width=_integers([slot.width for slot in host.slots]),
        gate_offset=_integers([slot.gate_offset for slot in host.slots]),
    )


def _integers(values: Sequence[int]) -> "ctypes.Array[c_int32]":
    return (c_int32 * max(1, len(values)))(*values)


class Pointers:
    """Addresses of tensors for one call; keeps what had to be converted alive until it is over."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def to(self, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
        """The address of the tensor as a contiguous one of ``dtype``; read by the library."""
        own = tensor.to(dtype or tensor.dtype).contiguous()
        self.kept.append(own)
        return own.data_ptr()

    def into(self, tensor: Tensor) -> int:
        """The address of a tensor that the library writes to."""
        assert tensor.is_contiguous()
        return tensor.data_ptr()

    def of_each(self, tensors: Sequence[Tensor]) -> int:
        """The address of an array of such addresses."""
        array = (c_void_p * max(1, len(tensors)))(*(self.into(tensor) for tensor in tensors))
        self.kept.append(array)
        return ctypes.addressof(array)
