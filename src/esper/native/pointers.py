"""Addresses of tensors for calls of the library."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


def addresses(tensors: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """An array of addresses of contiguous tensors; the caller keeps the tensors alive."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (ctypes.c_void_p * max(1, len(tensors)))(*(tensor.data_ptr() for tensor in tensors))


class Pointers:
    """Addresses for one call; keeps copies made for the call alive until it returns."""

    def __init__(self) -> None:
        self.references: list[object] = []

    def to(self, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
        """The address of ``tensor`` for reading; copied unless contiguous and of ``dtype``."""
        copy = tensor.to(dtype or tensor.dtype).contiguous()
        self.references.append(copy)
        return copy.data_ptr()

    def into(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor that the library writes to."""
        assert tensor.is_contiguous()
        return tensor.data_ptr()

    def of_each(self, tensors: Sequence[Tensor]) -> int:
        """The address of an array with the addresses of contiguous tensors."""
        self.references.append(array := addresses(tensors))
        return ctypes.addressof(array)

    def of(self, numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> int:
        """The address of an array of ``numbers``."""
        return self.to(torch.tensor(numbers, dtype=dtype))
