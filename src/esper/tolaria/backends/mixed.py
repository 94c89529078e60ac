"""Native where the library knows every seed of an environment, torch for the other environments."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from esper.kasmina.stack import Stack
from esper.tolaria.backends import Backend, EpochResult, HeldBack, Optimisation, Scores, Variant
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.minibatches import Minibatches
from esper.tolaria.plan import Seeds


class MixedBackend:
    """Implements ``Backend`` for hosts with blueprints that are written in Python alone.

    An environment is computed by torch in the calls in which such a seed takes part, otherwise by
    the library; which of them depends on no other environment.
    """

    name = "native"
    threaded = True

    def __init__(self, native: NativeBackend, others: TorchBackend):
        self.native, self.others = native, others

    def train_epoch(
        self, stack: Stack, seeds: Seeds, minibatches: Minibatches, optimisation: Optimisation
    ) -> EpochResult:
        """See ``Backend.train_epoch``."""
        foreign = self._foreign(seeds, seeds.computed)
        results, everyone = [], []
        for backend, rows in self._parts(foreign):
            if len(rows) == len(foreign):
                return backend.train_epoch(stack, seeds, minibatches, optimisation)
            part = stack.of_rows(rows)
            group = rows if minibatches.group is None else minibatches.group[rows]
            rates = replace(
                optimisation,
                host_learning_rate=optimisation.host_learning_rate[rows],
                seed_learning_rate=optimisation.seed_learning_rate[rows],
            )
            batches = replace(minibatches, group=group)
            results.append(backend.train_epoch(part, seeds.of_rows(rows), batches, rates))
            everyone.append(rows)
            for store, trained in zip(stack.stores(), part.stores(), strict=True):
                store[rows] = trained
        return _together(results, torch.cat(everyone).argsort())

    def evaluate(
        self,
        stack: Stack,
        seeds: Seeds,
        held_back: HeldBack,
        variants: list[Variant],
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        """See ``Backend.evaluate``."""
        acting = seeds.computed.long()
        for variant in variants:
            acting = acting.index_add(0, variant.rows, (variant.alpha > 0).long())
        foreign = self._foreign(seeds, acting > 0)
        everywhere = torch.arange(len(foreign)) if rows is None else rows
        found = _empty(len(foreign), stack.host.dtype)
        of_variants = [_empty(len(variant.rows), stack.host.dtype) for variant in variants]
        for backend, mine in self._parts(foreign):
            if len(mine) == len(foreign):
                return backend.evaluate(stack, seeds, held_back, variants, rows)
            place = torch.full_like(everywhere, -1)
            place[mine] = torch.arange(len(mine))
            parts = [
                (whole, keep, Variant(one.start, place[one.rows[keep]], one.alpha[keep]))
                for whole, one in zip(of_variants, variants, strict=True)
                if len(keep := (place[one.rows] >= 0).nonzero()[:, 0])
            ]
            data = replace(held_back, dataset=held_back.dataset[mine])
            scores, others = backend.evaluate(
                stack, seeds.of_rows(mine), data, [part for *_, part in parts], everywhere[mine]
            )
            found.put(mine, scores)
            for (whole, keep, _), other in zip(parts, others, strict=True):
                whole.put(keep, other)
        return found, of_variants

    def _foreign(self, seeds: Seeds, computed: Tensor) -> Tensor:
        """Where a seed is computed that the library does not know, bool ``[R]``."""
        return (computed & (self.native.kind_of[seeds.blueprint] < 0)).any(1)

    def _parts(self, foreign: Tensor) -> Iterator[tuple[Backend, Tensor]]:
        """The rows of each backend, int64 ``[m]``, where there are any."""
        parts: tuple[tuple[Backend, Tensor], ...]
        parts = (self.native, ~foreign), (self.others, foreign)
        for backend, where in parts:
            if bool(where.any()):
                yield backend, where.nonzero()[:, 0]


def _together(parts: list[EpochResult], order: Tensor) -> EpochResult:
    """The results of some rows and of the others, in the order of all."""
    return EpochResult(
        loss=torch.cat([part.loss for part in parts])[order],
        accuracy=torch.cat([part.accuracy for part in parts])[order],
        host_gradient_norm=torch.cat([part.host_gradient_norm for part in parts])[order],
        seed_gradient_norm=torch.cat([part.seed_gradient_norm for part in parts])[order],
        seed_tensor_norms=[
            torch.cat(norms)[order]
            for norms in zip(*(part.seed_tensor_norms for part in parts), strict=True)
        ],
    )


def _empty(count: int, dtype: torch.dtype) -> Scores:
    return Scores(*torch.empty(3, count, dtype=dtype))
