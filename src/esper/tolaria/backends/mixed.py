"""The native backend, with torch for environments that have a seed unknown to the library."""

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
    """Implements ``Backend`` for hosts that accept blueprints written only in Python.

    Torch computes an environment in the calls in which a seed of such a blueprint takes part, and
    the library computes it in all others. The choice does not depend on other environments.
    """

    name = "native"
    uses_all_threads = True

    def __init__(self, native: NativeBackend, fallback: TorchBackend):
        self.native, self.fallback = native, fallback

    def train_epoch(
        self, stack: Stack, seeds: Seeds, minibatches: Minibatches, optimisation: Optimisation
    ) -> EpochResult:
        """See ``Backend.train_epoch``."""
        foreign = self._foreign(seeds, seeds.computed)
        results, rows_done = [], []
        for backend, rows in self._parts(foreign):
            if len(rows) == len(foreign):
                return backend.train_epoch(stack, seeds, minibatches, optimisation)
            part = stack.of_rows(rows)
            group = rows if minibatches.group is None else minibatches.group[rows]
            rates = replace(
                optimisation,
                host_learning_rate=optimisation.host_learning_rate[rows],
                seed_learning_rate=optimisation.seed_learning_rate[rows],
                tuning=None if optimisation.tuning is None else optimisation.tuning[rows],
            )
            batches = replace(minibatches, group=group)
            results.append(backend.train_epoch(part, seeds.of_rows(rows), batches, rates))
            rows_done.append(rows)
            for store, rows_after in zip(stack.stores(), part.stores(), strict=True):
                store[rows] = rows_after
        order = torch.cat(rows_done).argsort()
        return results[0].map(lambda *parts: torch.cat(parts)[order], *results[1:])

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
        stack_rows = torch.arange(len(foreign)) if rows is None else rows
        host_scores = _empty(len(foreign), stack.host.dtype)
        variant_scores = [_empty(len(variant.rows), stack.host.dtype) for variant in variants]
        for backend, own_rows in self._parts(foreign):
            if len(own_rows) == len(foreign):
                return backend.evaluate(stack, seeds, held_back, variants, rows)
            position = torch.full_like(stack_rows, -1)
            position[own_rows] = torch.arange(len(own_rows))
            parts = [
                (total, keep, Variant(one.start, position[one.rows[keep]], one.alpha[keep]))
                for total, one in zip(variant_scores, variants, strict=True)
                if len(keep := (position[one.rows] >= 0).nonzero()[:, 0])
            ]
            data = replace(held_back, dataset=held_back.dataset[own_rows])
            scores, scores_of_parts = backend.evaluate(
                stack,
                seeds.of_rows(own_rows),
                data,
                [part for *_, part in parts],
                stack_rows[own_rows],
            )
            host_scores.put(own_rows, scores)
            for (total, keep, _), part_scores in zip(parts, scores_of_parts, strict=True):
                total.put(keep, part_scores)
        return host_scores, variant_scores

    def _foreign(self, seeds: Seeds, computing: Tensor) -> Tensor:
        """Rows that compute a seed unknown to the library, bool ``[R]``."""
        return (computing & (self.native.kind_of[seeds.blueprint] < 0)).any(1)

    def _parts(self, foreign: Tensor) -> Iterator[tuple[Backend, Tensor]]:
        """Each backend that has rows to compute, and its rows, int64 ``[m]``."""
        parts: tuple[tuple[Backend, Tensor], ...]
        parts = (self.native, ~foreign), (self.fallback, foreign)
        for backend, where in parts:
            if bool(where.any()):
                yield backend, where.nonzero()[:, 0]


def _empty(count: int, dtype: torch.dtype) -> Scores:
    return Scores(*torch.empty(3, count, dtype=dtype))
