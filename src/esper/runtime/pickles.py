"""Reads a pickled dictionary of plain values and byte arrays without running code from the pickle.

A pickle names functions to call. The few names that such a file needs are mapped to substitutes
that only store or encode their arguments; every other name is refused.
"""

import io
import pickle
from typing import Any

import numpy as np


class ByteArray:
    """The description of a numpy array of uint8 in a pickle."""

    def __init__(self, *_: Any):
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def numpy(self) -> np.ndarray:
        """The array.

        Raises:
            ValueError: it is not an array of uint8 in C order.
        """
        try:
            _, shape, dtype, fortran, raw = self.state
            if dtype.code not in ("u1", b"u1") or fortran or not isinstance(raw, bytes):
                raise ValueError("an array is not of uint8 in C order")
            return np.frombuffer(raw, np.uint8).reshape(shape)
        except (TypeError, AttributeError) as error:
            raise ValueError("an array is not of uint8 in C order") from error


class _Dtype:
    def __init__(self, code: Any = None, *_: Any):
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Ignore the state, such as byte order, which does not apply to bytes."""


def _encode(text: Any, codec: Any) -> bytes:
    if not isinstance(text, str) or codec != "latin1":
        raise pickle.UnpicklingError("it has bytes that are not encoded as latin1")
    return text.encode("latin1")


_SUBSTITUTES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): ByteArray,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): ByteArray,
    ("numpy._core.multiarray", "_reconstruct"): ByteArray,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _SUBSTITUTES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}") from None

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an external object")


def read_pickle(content: bytes) -> Any:
    """Unpickle ``content``, with ``ByteArray`` for arrays; strings of Python 2 stay bytes.

    Raises:
        ValueError: it cannot be read, or refers to anything other than arrays.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:
        # Corrupt bytes can raise any exception; the fault is in the file.
        raise ValueError(str(error) or type(error).__name__) from error
