"""The flat parameter store: the parameters of N networks as the rows of one matrix.

Everything one might do to an environment (clip, freeze, snapshot, roll back, germinate, prune) is
then an operation on rows and column ranges, and nothing is created or destroyed while training.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Field:
    """One named parameter of a network, and how it is born.

    An element starts at ``constant + bound * u`` with u uniform in (-1, 1).
    """

    name: str
    shape: tuple[int, ...]
    bound: float = 0.0
    constant: float = 0.0

    @property
    def size(self) -> int:
        return prod(self.shape)


def weight(name: str, *shape: int) -> Field:
    """A weight ``[out, in, ...]`` with the initial range of torch's layers, U(+-fan_in^-0.5)."""
    return Field(name, shape, bound=prod(shape[1:]) ** -0.5)


def zeros(name: str, *shape: int) -> Field:
    """A parameter that is born at 0."""
    return Field(name, shape)


def ones(name: str, *shape: int) -> Field:
    """A parameter that is born at 1."""
    return Field(name, shape, constant=1.0)


class Layout:
    """Where each field of a network lies within a row of the store."""

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

    def birth(self, width: int) -> tuple[Tensor, Tensor]:
        """Constant and bound of every column, two float64 vectors of ``width >= size``."""
        constant = torch.zeros(width, dtype=torch.float64)
        bound = torch.zeros(width, dtype=torch.float64)
        for field, offset in zip(self.fields, self.offsets, strict=True):
            constant[offset : offset + field.size] = field.constant
            bound[offset : offset + field.size] = field.bound
        return constant, bound

    def segments(self, width: int) -> Tensor:
        """Index of the field each column belongs to, int64 ``[width]``; the rest is one past."""
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
        return cls(
            torch.zeros_like(store),
            torch.zeros_like(store),
            torch.zeros(len(store), dtype=store.dtype, device=store.device),
        )

    def clear(self, rows: Tensor) -> None:
        """Forget the rows where ``rows [N]`` is true."""
        self.first.masked_fill_(rows[:, None], 0.0)
        self.second.masked_fill_(rows[:, None], 0.0)
        self.step.masked_fill_(rows, 0.0)


@dataclass(slots=True)
class Stack:
    """All trainable numbers of N hosts and their seeds.

    ``host [N, P]``, ``buffers [N, Q]`` (BatchNorm's running statistics), ``seeds[S] [N, P_s]``
    and the optimizer state of hosts and seeds. A row of ``seeds[s]`` is read according to the
    blueprint that lives in slot s of that environment; in an empty slot it is dormant.
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
        """Everything, optimizer state included."""
        states = (self.host_optimizer, *self.seed_optimizers)
        moving = [part for state in states for part in (state.first, state.second, state.step)]
        return [self.host, self.buffers, *self.seeds, *moving]

    def of_rows(self, rows: Tensor) -> "Stack":
        """A copy of ``rows``, int64 ``[M]``."""

        def taken(state: AdamState) -> AdamState:
            return AdamState(state.first[rows], state.second[rows], state.step[rows])

        return Stack(
            host=self.host[rows],
            buffers=self.buffers[rows],
            seeds=[seeds[rows] for seeds in self.seeds],
            host_optimizer=taken(self.host_optimizer),
            seed_optimizers=[taken(state) for state in self.seed_optimizers],
        )

    def clear_optimizers(self) -> None:
        """Forget the optimizer state of every host and seed."""
        everything = torch.ones(len(self.host), dtype=torch.bool, device=self.host.device)
        for state in (self.host_optimizer, *self.seed_optimizers):
            state.clear(everything)
