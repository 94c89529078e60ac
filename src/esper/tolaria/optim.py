"""Optimizers of hosts and seeds: clipping and updates of each row of a store independently."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from esper.kasmina.slots import SlotSpec
from esper.runtime.tasks import TUNINGS
from esper.tolaria.backends import Optimisation
from esper.tolaria.plan import SlotPlan
from esper.tolaria.stores import AdamState, Stack

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


# Native twin: hosts/optimizer.h, clip_scale.
def clip_scale(gradient: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Norm of each row, and the factor that scales it to at most ``max_norm``.

    Same as ``torch.nn.utils.clip_grad_norm_`` applied to each row separately.

    Args:
        gradient: ``[M, P]``.

    Returns:
        norm ``[M]`` before clipping, factor ``[M]`` in (0, 1].
    """
    norm = torch.linalg.vector_norm(gradient, dim=1)
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)


def update_(
    parameters: Tensor,
    gradient: Tensor,
    state: AdamState,
    learning_rate: Tensor,
    weight_decay: float,
    momentum: float | None = None,
    active: Tensor | None = None,
) -> None:
    """One update of SGD with momentum, or of AdamW if ``momentum`` is None, in place.

    Args:
        parameters: ``[M, P]``.
        gradient: ``[M, P]``; overwritten.
        state: moments and update counts of the same rows; SGD's momentum buffer is ``first``.
        learning_rate: ``[M]``, or ``[M, P]`` with a rate for each parameter.
        weight_decay: AdamW multiplies parameters by ``1 - learning_rate * weight_decay``; SGD adds
            this multiple of the parameters to the gradient.
        momentum: fraction of the momentum buffer that is kept.
        active: rows to update, ``[M]`` bool; all when None. The other rows keep parameters, moments
            and count; masking only the gradient would let momentum and decay move them.
    """
    stores = parameters, *state.parts
    before = [] if active is None else [store.clone() for store in stores]
    rate = learning_rate[:, None] if learning_rate.ndim == 1 else learning_rate
    state.step += 1.0
    if momentum is None:
        _adamw(parameters, gradient, state, rate, weight_decay)
    else:
        _sgd(parameters, gradient, state, rate, weight_decay, momentum)
    if active is not None:
        for now, then in zip(stores, before, strict=True):
            now.copy_(torch.where(active if now.ndim == 1 else active[:, None], now, then))


# Native twin: hosts/optimizer.h, adamw.
def _adamw(
    parameters: Tensor, gradient: Tensor, state: AdamState, rate: Tensor, weight_decay: float
) -> None:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""
    if weight_decay:
        parameters.mul_(1.0 - rate * weight_decay)
    state.first.lerp_(gradient, 1.0 - BETA1)
    state.second.mul_(BETA2).addcmul_(gradient, gradient, value=1.0 - BETA2)
    correction1 = 1.0 - BETA1**state.step
    correction2 = (1.0 - BETA2**state.step).sqrt()
    denominator = torch.sqrt(state.second, out=gradient).div_(correction2[:, None]).add_(EPSILON)
    step_size = rate / correction1[:, None]
    parameters.sub_(step_size * state.first / denominator)


# Native twin: hosts/optimizer.h, sgd.
def _sgd(
    parameters: Tensor,
    gradient: Tensor,
    state: AdamState,
    rate: Tensor,
    weight_decay: float,
    momentum: float,
) -> None:
    """SGD with momentum, same as ``torch.optim.SGD``."""
    if weight_decay:
        gradient.add_(parameters, alpha=weight_decay)
    state.first.mul_(momentum).add_(gradient)
    parameters.sub_(rate * state.first)


LAST, AUTO_RGN = TUNINGS.index("last"), TUNINGS.index("auto_rgn")
MIN_NORM = 1e-8
"""Smallest norm by which is divided, so that no weight and no gradient of 0 gives a NaN."""


# Native twin: hosts/optimizer.h, relative_rates.
def relative_rates(
    gradient: Tensor, parameters: Tensor, block_sizes: Sequence[int], tuning: Tensor
) -> Tensor:
    """Factor of the learning rate of each block of each host, ``[N, blocks]`` in [0, 1].

    With "auto_rgn" (Lee et al., "Surgical fine-tuning improves adaptation to distribution shifts",
    ICLR 2023, section 4) it is the norm of the block's gradient over that of its parameters, as a
    fraction of the largest of the host. The paper measures this ratio once per pass through the
    data, and here it is that of the minibatch.

    Args:
        gradient: ``[N, P]``; its scale does not matter.
        parameters: ``[N, P]``.
        block_sizes: parameters of each block, P together.
        tuning: index in ``TUNINGS``, int64 ``[N]``.
    """
    sizes = list(block_sizes)
    norms = [
        torch.stack([part.norm(dim=1) for part in rows.split(sizes, 1)], 1)
        for rows in (gradient, parameters)
    ]
    ratio = norms[0] / norms[1].clamp(min=MIN_NORM)
    relative = ratio / ratio.amax(1, keepdim=True).clamp(min=MIN_NORM)
    last = torch.zeros_like(relative)
    last[:, -1] = 1.0
    way = tuning[:, None]
    return torch.where(way == AUTO_RGN, relative, torch.where(way == LAST, last, 1.0))


def by_parameter(factors: Tensor, block_sizes: Sequence[int]) -> Tensor:
    """Factors ``[N, blocks]`` for each parameter, ``[N, P]``."""
    parts = zip(factors.unbind(1), block_sizes, strict=True)
    return torch.cat([factor[:, None].expand(-1, size) for factor, size in parts], 1)


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
        weight_decay: float = 0.0,
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
        rows, self.slot, self.kinds = plan.rows, slot, plan.kinds
        super().__init__(
            stack.seeds[slot][rows],
            stack.seed_optimizers[slot].of_rows(rows),
            optimisation,
            optimisation.seed_learning_rate[rows, slot],
            active=~frozen[rows, slot] if plan.any_frozen else None,
            rows=rows,
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
