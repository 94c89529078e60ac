"""The native backend: passes stacks to the C++ library."""

from collections.abc import Iterator
from ctypes import POINTER, c_int, c_int32, c_void_p
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.kasmina.newborns import HIDDEN_UNITS, reference_weights
from esper.leyline.actions import BLUEPRINTS
from esper.native.build import Unavailable
from esper.native.library import (
    SUFFIXES,
    Handle,
    Pointers,
    function,
    has_matrix_unit,
    library,
    multiplies_bfloat16,
    vector_bytes,
)
from esper.native.structures import Struct, definitions
from esper.tolaria.backends import Backend, HeldBack, Minibatches, Optimisation, Variant
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.plan import Seeds
from esper.tolaria.results import SLOT_MEASURES, EpochResult, Scores
from esper.tolaria.stores import Stack

CALLS = definitions()
KINDS = CALLS.enums["Kind"]
"""The blueprints that the library implements."""

FAMILY_OF: dict[type[Host], str] = {CnnHost: "conv", MlpHost: "mlp", TransformerHost: "sequence"}
"""Family of the hosts that the library implements."""

LEAST_ROUNDED = 32
"""Channels from which products in bfloat16 are worth the rounding of their factors."""

EVALUATION_LANES = 64
"""Images scored at once if activations are small."""
_ACTIVATION_BYTES = 1 << 20
"""Size limit of an activation of a chunk in bytes, so that it stays in the second-level cache."""


class NativeBackend:
    """Implements ``tolaria.backends.Backend`` for the hosts and blueprints that come with Esper.

    ``kind_of`` is the library's index of each blueprint, int64 ``[blueprints]``; -1 for blueprints
    that the library does not implement. This backend must not compute seeds of those blueprints.

    Args:
        host: a ``CnnHost``, an ``MlpHost`` or a ``TransformerHost``.
        dtype: float32 or float64.
        threads: threads that share the environments of a call; the number does not change results.
        rounds_factors: whether 3x3 convolutions between ``LEAST_ROUNDED`` channels and more round
            their factors to bfloat16; sums, and everything else, have the given dtype.

    Raises:
        Unavailable: the library cannot be built, or does not implement this host or dtype, or the
            processor does not multiply bfloat16.
    """

    name = "native"
    uses_all_threads = True
    measures_slots = True
    """Switched off only to find what measuring the slots costs."""

    def __init__(
        self, host: Host, dtype: torch.dtype, threads: int = 1, rounds_factors: bool = False
    ):
        if dtype not in SUFFIXES:
            raise Unavailable(f"it computes in float32 and float64, not {dtype}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        if rounds_factors and not multiplies_bfloat16():
            raise Unavailable("this processor does not multiply bfloat16")
        # A subclass may compute something else.
        if type(host) not in FAMILY_OF:
            raise Unavailable(f"it does not implement hosts of the type {type(host).__name__}")
        assert isinstance(host, CnnHost | MlpHost | TransformerHost)
        self.host, self.dtype = host, dtype
        suffix, at = SUFFIXES[dtype], Pointers()
        create = function(f"hosts_create_{suffix}", CALLS.HostSpec, c_int, POINTER(c_void_p))
        self.network = Handle(f"hosts_free_{suffix}")
        create(_host_spec(host, at, rounds_factors), threads, self.network.address)
        self._train = function(f"hosts_train_{suffix}", c_void_p, CALLS.TrainCall)
        self._evaluate = function(f"hosts_evaluate_{suffix}", c_void_p, CALLS.EvaluateCall)
        self.lock = Lock()
        self.kind_of = torch.tensor([KINDS.index(b) if b in KINDS else -1 for b in BLUEPRINTS])
        self.tensor_counts = torch.tensor([slot.segment_count for slot in host.slots])
        self.lanes = self._evaluation_lanes()
        self.packed: dict[int, tuple[Tensor, Tensor]] = {}
        self._check_layout()

    def train_epoch(
        self, stack: Stack, seeds: Seeds, minibatches: Minibatches, optimisation: Optimisation
    ) -> EpochResult:
        """See ``Backend.train_epoch``."""
        rows, slots = seeds.alpha.shape
        nan = float("nan")
        result = EpochResult(
            loss=torch.empty(rows, dtype=self.dtype),
            accuracy=torch.empty(rows, dtype=self.dtype),
            host_gradient_norm=torch.empty(rows, dtype=self.dtype),
            seed_gradient_norm=torch.full((rows, slots), nan, dtype=self.dtype),
            seed_tensor_norms=[
                torch.full((rows, slot.segment_count), nan, dtype=self.dtype)
                for slot in self.host.slots
            ],
            slots=torch.full((rows, slots, len(SLOT_MEASURES)), nan, dtype=self.dtype),
        )
        _, batches, batch_size = minibatches.drawn.shape
        augmentation, poses = minibatches.augmentation, minibatches.poses
        at = Pointers()
        call = CALLS.TrainCall(
            rows=rows,
            batches=batches,
            batch_size=batch_size,
            host=at.into(stack.host),
            host_first=at.into(stack.host_optimizer.first),
            host_second=at.into(stack.host_optimizer.second),
            host_step=at.into(stack.host_optimizer.step),
            buffers=at.into(stack.buffers),
            seed=at.of_each(stack.seeds),
            seed_first=at.of_each([state.first for state in stack.seed_optimizers]),
            seed_second=at.of_each([state.second for state in stack.seed_optimizers]),
            seed_step=at.of_each([state.step for state in stack.seed_optimizers]),
            **self._seeds(seeds, seeds.computed, at),
            frozen=at.to(seeds.frozen, torch.uint8),
            images=at.to(minibatches.images, self.dtype),
            labels=at.to(minibatches.labels),
            drawn=at.to(minibatches.of_rows(minibatches.drawn)),
            poses=0 if poses is None else at.to(minibatches.of_rows(poses)),
            reach=augmentation.reach if augmentation else 0,
            host_rate=at.to(optimisation.host_learning_rate, self.dtype),
            seed_rate=at.to(optimisation.seed_learning_rate, self.dtype),
            tuning=0 if optimisation.tuning is None else at.to(optimisation.tuning, torch.int32),
            weight_decay=optimisation.weight_decay,
            momentum=optimisation.momentum or 0.0,
            most_norm=optimisation.max_gradient_norm,
            rule=int(optimisation.momentum is not None),
            tensor_counts=at.to(self.tensor_counts, torch.int32),
            loss=at.into(result.loss),
            accuracy=at.into(result.accuracy),
            host_norm=at.into(result.host_gradient_norm),
            seed_norm=at.into(result.seed_gradient_norm),
            tensor_norms=at.of_each(result.seed_tensor_norms),
            slot_measures=at.into(result.slots) if self.measures_slots else 0,
        )
        with self.lock:
            self._train(self.network.address, call)
        return result

    def evaluate(
        self,
        stack: Stack,
        seeds: Seeds,
        held_back: HeldBack,
        variants: list[Variant],
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        """See ``Backend.evaluate``."""
        count = len(seeds.alpha)
        packed = self._packed(held_back)
        of_row = torch.cat([torch.zeros(0, dtype=torch.long), *(v.rows for v in variants)])
        order = of_row.argsort(stable=True)
        begins = torch.zeros(count + 1, dtype=torch.long)
        begins[1:] = torch.bincount(of_row, minlength=count).cumsum(0)
        starts = torch.tensor([v.start for v in variants], dtype=torch.int32).repeat_interleave(
            torch.tensor([len(v.rows) for v in variants], dtype=torch.long)
        )
        alpha = torch.cat([seeds.alpha[:0], *(v.alpha for v in variants)])
        scores = torch.empty(count, 3, dtype=self.dtype)
        variant_scores = torch.empty(len(of_row), 3, dtype=self.dtype)
        at = Pointers()
        call = CALLS.EvaluateCall(
            rows=count,
            images=held_back.labels.shape[1],
            lanes=self.lanes,
            chunks=packed.shape[1],
            host=at.into(stack.host),
            buffers=at.into(stack.buffers),
            seed=at.of_each(stack.seeds),
            row=at.to(torch.arange(count) if rows is None else rows),
            # Alpha 0 disables a seed; a variant may enable a seed that is disabled in its row.
            **self._seeds(seeds, torch.ones_like(seeds.computed), at),
            packed=at.into(packed),
            labels=at.to(held_back.labels),
            dataset=at.to(held_back.dataset),
            variants=at.to(begins),
            start=at.to(starts[order]),
            variant_alpha=at.to(alpha[order], self.dtype),
            scores=at.into(scores),
            variant_scores=at.into(variant_scores),
        )
        with self.lock:
            self._evaluate(self.network.address, call)
        in_order = torch.empty_like(variant_scores)
        in_order[order] = variant_scores
        parts = in_order.split([len(v.rows) for v in variants]) if variants else []
        return _scores(scores), [_scores(part) for part in parts]

    def _seeds(self, seeds: Seeds, computing: Tensor, at: Pointers) -> dict[str, int]:
        kind = torch.where(computing, self.kind_of[seeds.blueprint], -1)
        return {
            "kind": at.to(kind, torch.int32),
            "form": at.to(seeds.form, torch.int32),
            "alpha": at.to(seeds.alpha, self.dtype),
        }

    def _packed(self, held_back: HeldBack) -> Tensor:
        """The images in the layout of the library, ``[D, chunks, channels, pixels, lanes]``.

        The result is cached, because held-back sets do not change.
        """
        images = held_back.images
        entry = self.packed.get(images.data_ptr())
        if entry is not None and entry[0] is images:
            return entry[1]
        sets, count = images.shape[:2]
        chunks = -(-count // self.lanes)
        padded = images.new_zeros(sets, chunks * self.lanes, *images.shape[2:])
        padded[:, :count] = images
        numbers = padded.view(sets, chunks, self.lanes, *images.shape[2:])
        if isinstance(self.host, MlpHost):
            numbers_by_channel = numbers.permute(0, 1, 3, 4, 5, 2)
        else:
            numbers_by_channel = numbers.permute(0, 1, 5, 3, 4, 2)
        packed = numbers_by_channel.to(self.dtype).contiguous()
        self.packed[images.data_ptr()] = images, packed
        return packed

    def _evaluation_lanes(self) -> int:
        sizes = [slot.channels * slot.size[0] * slot.size[1] for slot in self.host.all_slots]
        lanes = vector_bytes(library()) * 8 // torch.finfo(self.dtype).bits
        image = max(sizes) * torch.finfo(self.dtype).bits // 8
        registers = max(1, _ACTIVATION_BYTES // (image * lanes))
        return min(EVALUATION_LANES, registers * lanes)

    def _check_layout(self) -> None:
        """Assert that Python and C++ agree on the layout of the stores."""
        result = (c_int32 * 2)()
        name = f"hosts_sizes_{SUFFIXES[self.dtype]}"
        sizes = function(name, c_void_p, c_int, c_int, POINTER(c_int32))
        sizes(self.network.address, -1, 0, result)
        assert list(result) == [self.host.layout.size, self.host.buffers.size]
        for s, slot in enumerate(self.host.slots):
            for kind in (kind for kind in slot.kinds if self.kind_of[kind] >= 0):
                sizes(self.network.address, s, int(self.kind_of[kind]), result)
                layout = slot.layouts[kind]
                assert list(result) == [layout.size, len(layout.fields)], BLUEPRINTS[kind]


def _host_spec(
    host: CnnHost | MlpHost | TransformerHost, at: Pointers, rounds_factors: bool
) -> Struct:
    """Description of a host for the library."""
    height, width, channels = host.image
    kernel, heads = getattr(host, "kernel", 1), getattr(host, "heads", 0)
    if isinstance(host, TransformerHost):
        blocks: tuple[int, ...] = (host.width,) * (host.layers + 1)
    else:
        blocks = host.channels if isinstance(host, CnnHost) else host.widths
    steps = CALLS.enums["Step"]
    program = [(steps.index(kind), number) for kind, number in host.program]
    weights = map(reference_weights, host.slots)
    spec: Struct = CALLS.HostSpec(
        family=CALLS.enums["Family"].index(FAMILY_OF[type(host)]),
        height=height,
        width=width,
        channels=channels,
        classes=host.classes,
        kernel=kernel,
        heads=heads,
        least_rounded=LEAST_ROUNDED if rounds_factors else 0,
        has_matrix_unit=has_matrix_unit(),
        steps=len(program),
        slots=len(host.slots),
        blocks=len(host.block_sizes),
        program=at.of([number for pair in program for number in pair]),
        block_channels=at.of(blocks),
        block_sizes=at.of(host.block_sizes),
        slot_channels=at.of([slot.channels for slot in host.slots]),
        slot_span=at.of([slot.span.block if slot.span else -1 for slot in host.slots]),
        span_layers=at.of([1 + len(slot.span.further) if slot.span else 0 for slot in host.slots]),
        slot_width=at.of([slot.width for slot in host.slots]),
        gate_offset=at.of([slot.gate_offset for slot in host.slots]),
        last_layers=at.of([sum(1 << layer for layer in slot.last_layers) for slot in host.slots]),
        hidden_units=HIDDEN_UNITS,
        hidden_weights=at.of_each([torch.cat([x.flatten() for x in each]) for each in weights]),
    )
    return spec


def _scores(table: Tensor) -> Scores:
    return Scores(*(column.contiguous() for column in table.unbind(1)))


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
