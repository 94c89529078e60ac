"""The loaded library: its availability, its functions and the errors of their calls."""

import ctypes
import logging
import subprocess
from collections.abc import Callable
from ctypes import c_int, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from esper.native.build import Unavailable, cached_library, shipped_libraries
from esper.native.structures import check_layout

SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}
"""Suffix of function names for each dtype."""
_OUT_OF_MEMORY, _FAILURE = 1, 2
_log = logging.getLogger(__name__)
Function = Callable[..., int]


def library() -> ctypes.CDLL:
    """The library: shipped with the package, or else compiled on first use.

    Raises:
        Unavailable: there is no compiler, or it fails.
        LayoutError: see ``check_layout``.
    """
    result = _found()
    if isinstance(result, Unavailable):
        raise result
    return result


def available() -> bool:
    """Whether the library is available; if not, log one line with the reason."""
    try:
        library()
    except Unavailable as reason:
        fall_back(str(reason))
        return False
    return True


@cache
def fall_back(reason: str, consequence: str = "using torch") -> None:
    """Log in one line that torch replaces the library, and why; each reason is logged once."""
    _log.warning(f"native backend: {reason}; {consequence}")


@cache
def _found() -> ctypes.CDLL | Unavailable:
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
        LayoutError: it was compiled with different structures.
    """
    handle = ctypes.CDLL(str(path))
    try:
        check_layout(handle)
    except AttributeError as error:
        raise OSError(f"{path.name} lacks a function: {error}") from error
    return handle


def function(name: str, *arguments: Any) -> Function:
    """A function of the library that raises an exception on failure.

    Args:
        name: name of the function without the prefix ``esper_``.
        arguments: ``ctypes`` types of its arguments; a structure is passed by reference.
    """
    call: Any = library()[f"esper_{name}"]
    call.restype, call.errcheck = c_int, _check
    call.argtypes = [
        ctypes.POINTER(kind) if issubclass(kind, ctypes.Structure) else kind for kind in arguments
    ]
    return call


def _check(result: int, _: Any, __: Any) -> int:
    """Raise the exception for a result defined in ``guarded.h``."""
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
        self.address, self._free = c_void_p(), library()[f"esper_{name}"]
        self._free.restype, self._free.argtypes = None, [c_void_p]

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        """Free the object now, without waiting until the last reference is gone."""
        if self.address:
            self._free(self.address)
            self.address = c_void_p()
