"""Rows of parameter stores in training with the torch backend: clipping, updates and norms."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import AdamState, Stack
from esper.tolaria.backends import Optimisation
from esper.tolaria.optim import clip_scale, update_
from esper.tolaria.plan import SlotPlan
from esper.tolaria.tuning import LAST, by_parameter, relative_rates


class StoreRows:
    """Rows of a store in training.

    Args:
        store: parameters of the rows, ``[M, P]``; updated in place, as is ``optimizer``.
        optimizer: moments and update counts of the rows.
        optimisation: clipping, momentum and loss scales.
        rate: learning rate of each row, ``[M]``, or of each of its parameters, ``[M, P]``.
        weight_decay: weight decay of all rows.
        active: rows to update, bool ``[M]``; all when None.
        rows: indices of these rows in the stack, int64 ``[M]``; all when None.

    Attributes:
        gradient: gradient of the last minibatch without overflow, ``[M, P]``; initially NaN.
        finite: rows whose last gradient was finite, bool ``[M]``; updated only with loss scaling.
    """

    def __init__(
        self,
        store: Tensor,
        optimizer: AdamState,
        optimisation: Optimisation,
        rate: Tensor,
        weight_decay: float,
        active: Tensor | None = None,
        rows: Tensor | None = None,
    ):
        self.store, self.optimizer, self.optimisation = store, optimizer, optimisation
        self.rate, self.weight_decay, self.active, self.rows = rate, weight_decay, active, rows
        self.gradient = torch.full_like(store, float("nan"))
        self.finite = torch.ones(len(store), dtype=torch.bool, device=store.device)

    def update(self, gradient: Tensor) -> None:
        """One optimizer step; with loss scaling, ``gradient [M, P]`` is that of the scaled loss."""
        active, scales = self.active, self.optimisation.scales
        if scales is None:
            self.gradient = gradient
        else:
            gradient, self.finite = scales.unscale(gradient, self.rows)
            self.gradient = torch.where(self.finite[:, None], gradient, self.gradient)
            active = self.finite if active is None else active & self.finite
        _, factor = clip_scale(gradient, self.optimisation.max_gradient_norm)
        update_(
            self.store,
            gradient * factor[:, None],
            self.optimizer,
            self.rate,
            self.weight_decay,
            self.optimisation.momentum,
            active,
        )

    def overflow(self) -> Tensor:
        """Rows whose last minibatch was skipped, bool ``[M]``."""
        return ~self.finite

    def unknown(self) -> Tensor:
        """Rows for which every minibatch was skipped, bool ``[M]``."""
        return self.gradient.isnan().any(1)

    @property
    def norm(self) -> Tensor:
        """Gradient norm of each row before clipping, ``[M]``."""
        return torch.linalg.vector_norm(self.gradient, dim=1)


class HostRows(StoreRows):
    """The hosts, whose blocks may be trained at different rates."""

    def __init__(self, stack: Stack, block_sizes: Sequence[int], optimisation: Optimisation):
        rate, decay = optimisation.host_learning_rate, optimisation.weight_decay
        super().__init__(stack.host, stack.host_optimizer, optimisation, rate, decay)
        self.block_sizes, self.whole_rate = block_sizes, rate

    def update(self, gradient: Tensor) -> None:
        """See ``StoreRows.update``. Only the gradient of parameters that are trained counts."""
        tuning = self.optimisation.tuning
        if tuning is not None:
            factors = relative_rates(gradient, self.store, self.block_sizes, tuning)
            factor = by_parameter(factors, self.block_sizes)
            frozen = (factor == 0.0) & (tuning == LAST)[:, None]
            gradient = gradient.masked_fill(frozen, 0.0)
            self.rate = self.whole_rate[:, None] * factor
        super().update(gradient)


class SeedRows(StoreRows):
    """The computed seeds of one slot, gathered for an epoch so that empty slots cost nothing."""

    rows: Tensor

    def __init__(
        self, stack: Stack, slot: int, plan: SlotPlan, frozen: Tensor, optimisation: Optimisation
    ):
        self.slot, rows = slot, plan.rows
        self.kinds = plan.kinds
        state = stack.seed_optimizers[slot]
        super().__init__(
            stack.seeds[slot][rows],
            state.of_rows(rows),
            optimisation,
            optimisation.seed_learning_rate[rows, slot],
            0.0,
            ~frozen[rows, slot] if plan.any_frozen else None,
            rows,
        )

    def tensor_norms(self, slot: SlotSpec) -> Tensor:
        """Gradient norm of every parameter tensor in the last minibatch, ``[M, tensors]``."""
        segments = slot.segment_table[self.kinds]
        squares = self.gradient.new_zeros(len(self.rows), slot.segment_count + 1)
        squares.scatter_add_(1, segments, self.gradient.square())
        return squares[:, :-1].sqrt()

    def write_back(self, stack: Stack) -> None:
        """Copy parameters and optimizer state into the stack."""
        stack.seeds[self.slot][self.rows] = self.store
        state = stack.seed_optimizers[self.slot]
        for part, value in zip(state.parts, self.optimizer.parts, strict=True):
            part[self.rows] = value


def in_any(stores: Sequence[StoreRows], where: Callable[[StoreRows], Tensor]) -> Tensor:
    """Environments where ``where`` is true for the host or a seed, bool ``[N]``.

    The first of ``stores`` holds the hosts.
    """
    hosts, *seed_stores = stores
    environments = where(hosts)
    for rows in seed_stores:
        environments[rows.rows] |= where(rows)
    return environments
