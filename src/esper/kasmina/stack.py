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


@dataclass(slots=True)
class AdamState:
    """Optimizer state of one store: moments ``[N, P]`` and update count ``[N]``."""

    first: Tensor
    second: Tensor
    step: Tensor

    @classmethod
    def zeros_like(cls, store: Tensor) -> "AdamState":
        """The state before the first update of ``store [N, P]``."""
        return cls(
            torch.zeros_like(store),
            torch.zeros_like(store),
            torch.zeros(len(store), dtype=store.dtype, device=store.device),
        )

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The moments and the update count."""
        return self.first, self.second, self.step

    def of_rows(self, rows: Tensor) -> "AdamState":
        """A copy of the rows with the indices ``rows``, int64 ``[M]``."""
        return AdamState(*(part[rows] for part in self.parts))

    def clear(self, rows: Tensor) -> None:
        """Reset the rows where ``rows [N]`` is true."""
        for part in self.parts:
            part.masked_fill_(rows.view(-1, *[1] * (part.ndim - 1)), 0.0)

    def clear_rows(self, rows: Tensor) -> None:
        """Reset the rows with the indices ``rows``, int64 ``[M]``."""
        for part in self.parts:
            part.index_fill_(0, rows, 0.0)


@dataclass(slots=True)
class Stack:
    """Parameters, buffers and optimizer state of N hosts and their seeds.

    The parameters are ``host [N, P]`` and, for each slot s, ``seeds[s] [N, P_s]``; the buffers are
    ``buffers [N, Q]``, such as BatchNorm's running statistics. The layout of a row of ``seeds[s]``
    is that of the blueprint in slot s of the environment; in an empty slot the row is unused.
    """

    host: Tensor
    buffers: Tensor
    seeds: list[Tensor]
    host_optimizer: AdamState
    seed_optimizers: list[AdamState]

    @classmethod
    def allocate(
        cls,
        rows: int,
        host_width: int,
        buffer_width: int,
        seed_widths: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Stack":
        """A stack of zeros for ``rows`` environments; widths are numbers of columns."""

        def store(width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=device)

        host, seeds = store(host_width), [store(width) for width in seed_widths]
        return cls(
            host=host,
            buffers=store(buffer_width),
            seeds=seeds,
            host_optimizer=AdamState.zeros_like(host),
            seed_optimizers=[AdamState.zeros_like(seed) for seed in seeds],
        )

    def stores(self) -> list[Tensor]:
        """All tensors, including optimizer state."""
        states = (self.host_optimizer, *self.seed_optimizers)
        optimizer = [part for state in states for part in state.parts]
        return [self.host, self.buffers, *self.seeds, *optimizer]

    def of_rows(self, rows: Tensor) -> "Stack":
        """A copy of the rows with indices ``rows``, int64 ``[M]``."""
        return Stack(
            host=self.host[rows],
            buffers=self.buffers[rows],
            seeds=[seeds[rows] for seeds in self.seeds],
            host_optimizer=self.host_optimizer.of_rows(rows),
            seed_optimizers=[state.of_rows(rows) for state in self.seed_optimizers],
        )

    def clear_optimizers(self) -> None:
        """Reset the optimizer state of all hosts and seeds."""
        all_rows = torch.ones(len(self.host), dtype=torch.bool, device=self.host.device)
        for state in (self.host_optimizer, *self.seed_optimizers):
            state.clear(all_rows)
