"""The structures of ``src/calls.h``, and the library's functions for one dtype."""

import ctypes
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from esper.tolaria.backends.native.build import library
from esper.tolaria.backends.native.interface import SUFFIXES, checked

SOURCE = Path(__file__).parent / "src"
CHOOSE = ("given", "sampled", "most probable")


class PolicySpec(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int32) for name in ("host_features", "slot_features", "critic_features")),
        *((name, c_int32) for name in ("blueprints", "kind_width", "slot_width", "hidden")),
        *((name, c_int32) for name in ("ops", "op_width")),
        *((name, c_int32) for name in ("op_hidden", "slot_hidden", "trunk", "value_hidden")),
        ("choices", c_int32),
        *((name, c_void_p) for name in ("widths", "relevant", "canonical")),
    ]


class PolicyCall(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("steps", "environments", "slots")),
        *((name, c_void_p) for name in ("host", "slot", "critic", "blueprint", "may", "kinds")),
        *((name, c_void_p) for name in ("hidden", "cell")),
        ("choose", c_int32),
        ("uniform", c_void_p),
        ("widest", c_int64),
        *((name, c_void_p) for name in ("actions", "log_prob", "entropy", "value", "choice")),
        *((name, c_void_p) for name in ("hidden_after", "cell_after")),
    ]


class Library:
    """The functions for one dtype.

    Raises:
        Unavailable: the library cannot be built, or knows the dtype not.
    """

    def __init__(self, dtype: torch.dtype):
        found, suffix = library(SOURCE), SUFFIXES[dtype]

        def function(name: str, result: type | None, *arguments: type) -> "ctypes._FuncPointer":
            pointer = getattr(found, f"esper_policy_{name}_{suffix}")
            pointer.restype, pointer.argtypes = result, arguments
            return pointer

        spec, call, pointers = POINTER(PolicySpec), POINTER(PolicyCall), POINTER(c_void_p)
        self.forward = checked(function("forward", c_int, spec, pointers, call, c_int, pointers))
        self.again = checked(function("again", c_int, c_void_p, call, c_int))
        gradients = (c_void_p, c_void_p, c_void_p, pointers)
        self.backward = checked(function("backward", c_int, c_void_p, *gradients, c_int))
        self.free = function("free", None, c_void_p)


@cache
def library_for(dtype: torch.dtype) -> Library:
    """The library's functions for ``dtype``, see ``Library``."""
    return Library(dtype)
