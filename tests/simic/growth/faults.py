"""Injected faults: a number that is not finite, in one environment, in one minibatch.

Each fault is a function of a shard that arms the fault for the next step and returns a function
that removes it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from esper.simic.growth.shard import Shard
from esper.tolaria import optim
from esper.tolaria.backends import torch as backend

Fault = Callable[[Shard], Callable[[], None]]


def in_loss(row: int, bad: float, minibatch: int = 0) -> Fault:
    """In the loss of one minibatch, and so in the gradients of everything it depends on."""

    def arm(shard: Shard) -> Callable[[], None]:
        original, calls = backend.cross_entropy, iter(range(1_000))

        def poisoned(logits: Tensor, labels: Tensor) -> Tensor:
            loss = original(logits, labels)
            factor = torch.ones_like(loss)
            if next(calls) == minibatch:
                factor[row] = bad
            return loss * factor

        backend.cross_entropy = poisoned
        return lambda: setattr(backend, "cross_entropy", original)

    return arm


def in_host_gradient(row: int, bad: float, minibatch: int = 0) -> Fault:
    """In one number of the host's gradient."""

    def arm(shard: Shard) -> Callable[[], None]:
        original, calls = optim.clip_scale, iter(range(1_000))
        width = shard.engine.stack.host.shape[1]

        def poisoned(gradient: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
            of_hosts = gradient.shape == (len(shard.engine.rows), width)
            if of_hosts and next(calls) == minibatch:
                gradient[row, 0] = bad
            return original(gradient, max_norm)

        optim.clip_scale = poisoned
        return lambda: setattr(optim, "clip_scale", original)

    return arm


def in_seed_gradient(row: int, bad: float, slot: int, minibatch: int = 0) -> Fault:
    """In one number of a seed's gradient."""

    def arm(shard: Shard) -> Callable[[], None]:
        original, calls = optim.SeedRows.update, iter(range(1_000))

        def poisoned(self, gradient: Tensor) -> None:
            if self.slot == slot and next(calls) == minibatch:
                place = (self.rows == row).nonzero()[:, 0]
                assert len(place) == 1
                gradient = gradient.clone()
                gradient[place, 0] = bad
            original(self, gradient)

        optim.SeedRows.update = poisoned
        return lambda: setattr(optim.SeedRows, "update", original)

    return arm


def in_seed_output(row: int, bad: float, slot: int, minibatch: int = 0) -> Fault:
    """In the output of a seed's branch, for one image of one minibatch."""

    def arm(shard: Shard) -> Callable[[], None]:
        block, original, calls = backend.slot_block, backend.branch, iter(range(1_000))
        host_slot = shard.engine.slots[slot]
        coming: list[Tensor] = []

        def announced(spec, plan, store: Tensor, x: Tensor, source: Tensor | None) -> Tensor:
            coming[:] = [group.rows for group in plan.groups]
            return block(spec, plan, store, x, source)

        def poisoned(spec, kind, form, parameters, *read: Tensor | None) -> Tensor:
            f, rows = original(spec, kind, form, parameters, *read), coming.pop(0)
            here = spec is host_slot and bool((rows == row).any())
            if here and torch.is_grad_enabled() and next(calls) == minibatch:
                f = f.clone()
                f[0, :, :, rows == row] *= bad
            return f

        backend.slot_block, backend.branch = announced, poisoned

        def disarm() -> None:
            backend.slot_block, backend.branch = block, original

        return disarm

    return arm


def in_optimizer(row: int, bad: float, slot: int | None = None) -> Fault:
    """In an optimizer moment of the host, or of the seed in a slot, between two steps."""

    def arm(shard: Shard) -> Callable[[], None]:
        stack = shard.engine.stack
        state = stack.host_optimizer if slot is None else stack.seed_optimizers[slot]
        state.first[row, 0] = bad
        return lambda: None

    return arm


def together(*faults: Fault) -> Fault:
    """Several faults in the same step."""

    def arm(shard: Shard) -> Callable[[], None]:
        undo = [fault(shard) for fault in faults]

        def disarm() -> None:
            for function in reversed(undo):
                function()

        return disarm

    return arm
