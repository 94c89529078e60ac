"""The loaded library: its availability, its functions, their arguments and their errors."""

import ctypes
import logging
import subprocess
from collections.abc import Callable, Sequence
from ctypes import c_int, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.native.build import Unavailable, cached_library, shipped_libraries

SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}
"""Suffix of function names for each dtype."""
_OUT_OF_MEMORY, _FAILURE = 1, 2
_log = logging.getLogger(__name__)


def library() -> ctypes.CDLL:
    """The library: shipped with the package, or else compiled on first use.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    outcome = _library_or_reason()
    if isinstance(outcome, Unavailable):
        raise outcome
    return outcome


def available() -> bool:
    """Whether the library is available; if not, log one line with the reason."""
    try:
        library()
    except Unavailable as reason:
        fall_back(str(reason))
        return False
    return True


@cache
def fall_back(reason: str, consequence: str = "using torch", backend: str = "native") -> None:
    """Log in one line that torch replaces a backend, and why; each reason is logged once."""
    _log.warning(f"{backend} backend: {reason}; {consequence}")


@cache
def _library_or_reason() -> ctypes.CDLL | Unavailable:
    """The library, or why it is not available; cached, so a failure is not retried."""
    for path in shipped_libraries():
        try:
            return load(path)
        except OSError as error:
            _log.warning(f"native backend: {path.name} cannot be loaded here ({error})")
    try:
        try:
            return load(cached_library())
        except OSError:
            # Whole, but made for another system, as by a compiler that was replaced since.
            return load(cached_library(rebuild=True))
    except Unavailable as reason:
        return reason
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return Unavailable(f"building it failed ({error})")


def load(path: Path) -> ctypes.CDLL:
    """Load a compiled library.

    Raises:
        OSError: it is damaged, or lacks functions.
    """
    dll = ctypes.CDLL(str(path))
    try:
        vector_bytes(dll)
    except ValueError as error:
        raise OSError(f"{path.name} lacks a function: {error}") from error
    return dll


def vector_bytes(of: ctypes.CDLL) -> int:
    """Width of the library's SIMD registers in bytes."""
    return c_int.in_dll(of, "esper_vector_bytes").value


def multiplies_bfloat16() -> bool:
    """Whether the library is available and this processor has instructions for bfloat16."""
    return _has("bfloat16")


def has_matrix_unit() -> bool:
    """Whether they include those of a matrix unit (AMX) that this process may use."""
    return _has("matrix_unit")


def _has(name: str) -> bool:
    try:
        return bool(c_int.in_dll(library(), f"esper_has_{name}").value)
    except Unavailable:
        return False


def function(name: str, *arguments: Any) -> Callable[..., int]:
    """A function of the library that raises an exception on failure.

    Args:
        name: name of the function without the prefix ``esper_``.
        arguments: ``ctypes`` types of its arguments; a structure is passed by reference.
    """
    types = [
        ctypes.POINTER(kind) if issubclass(kind, ctypes.Structure) else kind for kind in arguments
    ]
    address: Any = c_void_p.in_dll(library(), f"esper_{name}").value
    result: Any = ctypes.CFUNCTYPE(c_int, *types)(address)
    result.errcheck = _check
    return result


def _check(result: int, _: Any, __: Any) -> int:
    """Raise the exception for a result defined in ``library.cpp``."""
    if result == _OUT_OF_MEMORY:
        raise MemoryError("the native backend ran out of memory")
    if result == _FAILURE:
        raise RuntimeError("the native backend failed")
    return result


class Handle:
    """Owns an object that the library created, and frees it.

    Args:
        name: name of the function that frees it, without the prefix ``esper_``.
    """

    def __init__(self, name: str):
        self.address, self._free = c_void_p(), function(name, c_void_p)

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        """Free the object now, without waiting until the last reference is gone."""
        if self.address:
            self._free(self.address)
            self.address = c_void_p()


def addresses(tensors: Sequence[Tensor]) -> "ctypes.Array[c_void_p]":
    """An array of addresses of contiguous tensors; the caller keeps the tensors alive."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (c_void_p * max(1, len(tensors)))(*(tensor.data_ptr() for tensor in tensors))


class Pointers:
    """Addresses for one call; keeps copies made for the call alive until it returns."""

    def __init__(self) -> None:
        self.buffers: list[object] = []

    def to(self, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
        """The address of ``tensor`` for reading; copied unless contiguous and of ``dtype``."""
        copy = tensor.to(dtype or tensor.dtype).contiguous()
        self.buffers.append(copy)
        return copy.data_ptr()

    def into(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor that the library writes to."""
        assert tensor.is_contiguous()
        return tensor.data_ptr()

    def of_each(self, tensors: Sequence[Tensor]) -> int:
        """The address of an array with the addresses of contiguous tensors."""
        self.buffers += [array := addresses(tensors), tensors]
        return ctypes.addressof(array)

    def of(self, numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> int:
        """The address of an array of ``numbers``."""
        return self.to(torch.tensor(numbers, dtype=dtype))
