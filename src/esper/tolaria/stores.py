"""The stores of N networks in training: parameters, buffers and optimizer state, a row for each.

``kasmina.stack`` says what the columns of a row are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
