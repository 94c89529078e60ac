"""The flat parameter store: each row of a matrix holds the parameters of one of N networks.

Every change to an environment (clip, freeze, snapshot, roll back, germinate, prune) is therefore an
operation on rows and column ranges, and training allocates and frees no parameters.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Field:
    """One named parameter tensor of a network, and its initial distribution.

    An element starts at ``constant + bound * u`` with u uniform in (-1, 1).
    """

    name: str
    shape: tuple[int, ...]
    bound: float = 0.0
    constant: float = 0.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def initial(self, generator: torch.Generator | None = None) -> Tensor:
        """Initial values, float32 ``[*shape]``; torch's global generator draws if None."""
        draws = 2.0 * torch.rand(self.shape, generator=generator) - 1.0
        return self.constant + self.bound * draws


def weight(name: str, *shape: int) -> Field:
    """A weight ``[out, in, ...]``, initially uniform within +-fan_in^-0.5, as in torch's layers."""
    return Field(name, shape, bound=prod(shape[1:]) ** -0.5)


def zeros(name: str, *shape: int) -> Field:
    """A parameter that is initially 0."""
    return Field(name, shape)


def ones(name: str, *shape: int) -> Field:
    """A parameter that is initially 1."""
    return Field(name, shape, constant=1.0)


class Layout:
    """Positions of the fields of a network within a row of the store."""

    def __init__(self, fields: tuple[Field, ...]):
        self.fields = fields
        self.offsets = [sum(f.size for f in fields[:i]) for i in range(len(fields))]
        self.size = sum(f.size for f in fields)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Named parameters ``[M, *shape]`` as views of ``rows [M, >= size]``."""
        parts = rows[:, : self.size].split([f.size for f in self.fields], 1)
        return {
            f.name: part.unflatten(1, f.shape) if f.shape else part[:, 0]
            for f, part in zip(self.fields, parts, strict=True)
        }

    def initial_distribution(self, width: int) -> tuple[Tensor, Tensor]:
        """Initial constant and bound of each column, two float64 vectors of ``width >= size``."""
        constant = torch.zeros(width, dtype=torch.float64)
        bound = torch.zeros(width, dtype=torch.float64)
        for field, offset in zip(self.fields, self.offsets, strict=True):
            constant[offset : offset + field.size] = field.constant
            bound[offset : offset + field.size] = field.bound
        return constant, bound

    def segments(self, width: int) -> Tensor:
        """Field index of each column, int64 ``[width]``; ``len(fields)`` for unused columns."""
        index = torch.full((width,), len(self.fields))
        for i, (field, offset) in enumerate(zip(self.fields, self.offsets, strict=True)):
            index[offset : offset + field.size] = i
        return index
