"""The torch backend: operations over stacked environments, on any device.

It needs no compiler and is the reference for the other backends.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina import blueprints, ops
from esper.kasmina.blueprints import Form
from esper.kasmina.hosts.host import BlockHost, Host, Tensors
from esper.kasmina.hosts.module import ModuleHost
from esper.kasmina.slots import SlotSpec
from esper.tolaria.backends import HeldBack, Minibatches, Optimisation, Variant
from esper.tolaria.optim import HostRows, SeedRows, StoreRows, in_any
from esper.tolaria.plan import Group, Plan, Seeds, SlotPlan, plan
from esper.tolaria.precision import LossScales, Precision
from esper.tolaria.results import SLOT_MEASURES, EpochResult, Scores
from esper.tolaria.slot_measures import Watch, slot_measures
from esper.tolaria.stores import Stack


class Network(NamedTuple):
    """Hosts with their seeds, as a forward pass reads them.

    ``parameters`` and ``buffers`` are those of N hosts by name. ``seeds[s] [M, width]`` are the
    parameters of the seeds of slot ``s`` in the order of ``calls[s].rows``.
    """

    parameters: Tensors
    buffers: Tensors
    seeds: dict[int, Tensor]
    calls: Plan


EVALUATION_BATCH = 100
"""Maximum validation images per pass, so that activations of many hosts stay in the cache."""

EVALUATION_PREDICTIONS = 400
"""Maximum predictions per pass; a sequence makes one prediction per position."""


class TorchBackend:
    """Implements ``tolaria.backends.Backend`` for any ``BlockHost``."""

    name = "torch"
    uses_all_threads = False
    measures_slots = True
    """Switched off only to find what measuring the slots costs."""

    def __init__(self, host: Host, precision: Precision):
        self.host = host
        self.precision = precision
        self._span_blocks = {slot.span.block for slot in host.slots if slot.span is not None}
        most = EVALUATION_PREDICTIONS // prod(host.label_shape)
        self.evaluation_batch = max(1, min(EVALUATION_BATCH, most))

    # Native twin: hosts/worker.h, train.
    def train_epoch(
        self, stack: Stack, seeds: Seeds, minibatches: Minibatches, optimisation: Optimisation
    ) -> EpochResult:
        """See ``Backend.train_epoch``."""
        calls, scales = plan(seeds), optimisation.scales
        hosts = HostRows(stack, self.host.block_sizes, optimisation)
        seed_stores = {
            s: SeedRows(stack, s, p, seeds.frozen, optimisation)
            for s, p in enumerate(calls)
            if p is not None
        }
        all_stores = [hosts, *seed_stores.values()]
        buffers = self.host.buffers.views(stack.buffers)
        losses, hits = [], []
        slots = stack.host.new_full(
            (*seeds.computed.shape, len(SLOT_MEASURES)), float("nan"), dtype=stack.host.dtype
        )
        last = minibatches.drawn.shape[1] - 1
        for batch, (images, drawn_labels) in enumerate(minibatches):
            watch = Watch() if batch == last and self.measures_slots else None
            labels = drawn_labels.flatten(1)
            host = stack.host.detach().requires_grad_()
            leaves = {s: rows.store.detach().requires_grad_() for s, rows in seed_stores.items()}
            with self.precision.autocast():
                network = Network(self.host.layout.views(host), buffers, leaves, calls)
                logits = self._forward(network, images, training=True, watch=watch)
                loss = cross_entropy(logits, labels)
            total = loss.sum() if scales is None else (loss * scales.scale).sum()
            outputs = [] if watch is None else list(watch.outputs.values())
            gradients = torch.autograd.grad(
                total, [host, *leaves.values(), *outputs], materialize_grads=True
            )
            if watch is not None:
                slots = self._slots(watch, gradients, host.detach(), labels.shape[1], seeds, scales)
            for rows, gradient in zip(all_stores, gradients, strict=False):
                rows.update(gradient)
            losses.append(loss.detach())
            hits.append((logits.detach().argmax(-1) == labels).to(loss.dtype).mean(1))
            if scales is not None:
                scales.adjust(in_any(all_stores, StoreRows.overflow), losses[-1])
        for rows in seed_stores.values():
            rows.write_back(stack)
        result = self._result(torch.stack(losses), torch.stack(hits), hosts, seed_stores, slots)
        if scales is not None:
            result.unmeasured = scales.adaptable & in_any(all_stores, StoreRows.unknown)
        return result

    def _result(
        self,
        losses: Tensor,
        hits: Tensor,
        hosts: StoreRows,
        seeds: dict[int, SeedRows],
        slots: Tensor,
    ) -> EpochResult:
        count = losses.shape[1]
        norms = losses.new_full((count, len(self.host.slots)), float("nan"))
        tensor_norms = []
        for s, slot in enumerate(self.host.slots):
            by_tensor = losses.new_full((count, slot.segment_count), float("nan"))
            if s in seeds:
                norms[seeds[s].rows, s] = seeds[s].norm
                by_tensor[seeds[s].rows] = seeds[s].tensor_norms(slot)
            tensor_norms.append(by_tensor)
        return EpochResult(losses.mean(0), hits.mean(0), hosts.norm, norms, tensor_norms, slots)

    def _slots(
        self,
        watch: Watch,
        gradients: Sequence[Tensor],
        parameters: Tensor,
        predictions: int,
        seeds: Seeds,
        scales: LossScales | None,
    ) -> Tensor:
        """The measurements of the slots; the last of ``gradients`` are those of the activations."""
        of_host, of_slots = gradients[0], gradients[len(gradients) - len(watch.outputs) :]
        if scales is not None:
            of_host = of_host / scales.scale[:, None]
            of_slots = [part.float() / scales.scale[:, None] for part in of_slots]
        by_slot = dict(zip(watch.outputs, of_slots, strict=True))
        return slot_measures(
            self.host, watch, by_slot, parameters, of_host, predictions, seeds.computed
        )

    # Native twin: hosts/worker.h, evaluate.
    @torch.no_grad()
    def evaluate(
        self,
        stack: Stack,
        seeds: Seeds,
        held_back: HeldBack,
        variants: list[Variant],
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        """See ``Backend.evaluate``. A variant resumes at the first slot whose alpha differs."""
        images, labels = held_back.by_row()
        complete = self._read(stack, seeds, rows)
        readings = [
            self._read(stack, seeds.of_variant(v), v.rows if rows is None else rows[v.rows])
            for v in variants
        ]
        starts = [self._resumption(v.start) for v in variants]
        sources: dict[int, Tensor] = {}
        totals = [_ScoreSums() for _ in range(1 + len(variants))]
        batches = zip(
            images.split(self.evaluation_batch), labels.split(self.evaluation_batch, 1), strict=True
        )
        for batch, drawn_labels in batches:
            batch_labels = drawn_labels.flatten(1)
            inputs = dict.fromkeys(starts, batch)
            x = batch.contiguous()
            with self.precision.autocast():
                logits = self._forward(complete, x, inputs=inputs, sources=sources)
            totals[0].add(logits, batch_labels)
            for total, start, reading, variant in zip(
                totals[1:], starts, readings, variants, strict=True
            ):
                resumption = _rows_of(inputs[start], variant.rows)
                # Images that all environments share are read as they are.
                read = {
                    block: x if x.shape[3] == 1 else _rows_of(x, variant.rows)
                    for block, x in sources.items()
                }
                with self.precision.autocast():
                    logits = self._forward(reading, resumption, start=start, sources=read)
                truth = batch_labels if len(batch_labels) == 1 else batch_labels[variant.rows]
                total.add(logits, truth)
        scores = [total.scores() for total in totals]
        return scores[0], scores[1:]

    @torch.no_grad()
    def logits(self, stack: Stack, seeds: Seeds, images: Tensor) -> Tensor:
        """Logits ``[N, B, *label_shape, classes]`` of all hosts in evaluation mode.

        Args:
            stack: parameters.
            seeds: the acting seeds.
            images: ``[B, H, W, C]``, the same for all hosts.
        """
        network = self._read(stack, seeds, None)
        logits = self._forward(network, images[:, :, :, None].contiguous())
        return logits.unflatten(1, (-1, *self.host.label_shape))

    def _resumption(self, slot: int) -> int:
        """The instruction at which a variant resumes if its first different seed is in ``slot``."""
        return cast(BlockHost, self.host).program.index(("slot", slot))

    def _read(self, stack: Stack, seeds: Seeds, rows: Tensor | None) -> Network:
        """The network of ``rows``, all when None, with ``seeds``."""
        host, buffers, calls = stack.host, stack.buffers, plan(seeds)
        if rows is not None:
            host, buffers = host.index_select(0, rows), buffers.index_select(0, rows)
        parameters = {
            s: stack.seeds[s].index_select(0, p.rows if rows is None else rows[p.rows])
            for s, p in enumerate(calls)
            if p is not None
        }
        views = self.host.layout.views(host), self.host.buffers.views(buffers)
        return Network(*views, parameters, calls)

    def _forward(
        self,
        network: Network,
        x: Tensor,
        *,
        training: bool = False,
        start: int = 0,
        inputs: dict[int, Tensor] | None = None,
        watch: Watch | None = None,
        sources: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Logits ``[N, P, classes]`` of ``x [B, H, W, N, C]`` from instruction ``start`` on.

        The inputs of the instructions that ``inputs`` has replace its values, those of the blocks
        that a slot spans become values of ``sources``, and the activations at the slots are stored
        in ``watch``.
        """
        host = cast(BlockHost, self.host)
        sources = {} if sources is None else sources
        for position, instruction in enumerate(host.program[start:], start):
            if inputs is not None and position in inputs:
                inputs[position] = x
            if instruction.kind == "block" and instruction.number in self._span_blocks:
                sources[instruction.number] = x
            if instruction.kind == "slot":
                span = host.slots[instruction.number].span
                source = None if span is None else sources[span.block]
                x = self._at_slot(instruction.number, network, watch, x, source)
            else:
                x = host.compute(instruction, network.parameters, network.buffers, x, training)
        return x

    def _at_slot(
        self,
        slot: int,
        network: Network,
        watch: Watch | None,
        x: Tensor,
        source: Tensor | None = None,
    ) -> Tensor:
        """The activation after a slot, from the activation ``x [B, H, W, N, C]`` before it.

        ``source`` is the input of the layer that the slot spans.
        """
        plan = network.calls[slot]

        def with_seeds(x: Tensor) -> Tensor:
            y = x
            if plan is not None:
                y = slot_block(self.host.slots[slot], plan, network.seeds[slot], x, source)
            return y if watch is None else watch.note(slot, x, y, source)

        return on_pixels(with_seeds, x)


def on_pixels(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of an activation ``[B, H, W, N, C]``, or of logits ``[N, B, C]`` as a pixel."""
    return function(x) if x.dim() == 5 else function(ops.per_pixel(x))[:, 0, 0].transpose(0, 1)


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """``rows`` of an activation ``[B, H, W, N, C]`` or of logits ``[N, B, classes]``."""
    return x.index_select(3 if x.dim() == 5 else 0, rows)


# Native twin: hosts/loss.h, score_batch.
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats: ``logits [N, B, K]``, ``labels [N, B]`` to ``[N]``."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape).mean(1)


# Native twin: hosts/slot.h, Slot.
def slot_block(
    slot: SlotSpec, plan: SlotPlan, parameters: Tensor, x: Tensor, source: Tensor | None = None
) -> Tensor:
    """The activation ``x [B, H, W, N, C]`` with the slot's seeds applied.

    ``parameters [M, width]`` are the rows of the slot's store for ``plan.rows``. ``source`` is what
    the seeds read in a slot that spans a layer, ``[B, H, W, N or 1, C]``.
    """
    inputs = _Take.apply(x, plan.groups)
    sizes = [len(group.rows) for group in plan.groups]
    sources: Sequence[Tensor | None] = [None] * len(sizes)
    if source is not None:
        sources = _Take.apply(source.expand(-1, -1, -1, x.shape[3], -1), plan.groups)
    parts = zip(plan.groups, parameters.split(sizes), inputs, sources, strict=True)
    branches = [
        branch(slot, each.kind, each.form, seed_views(slot, each.kind, each.form, theta), *read)
        for each, theta, *read in parts
    ]
    return _Attach.apply(x, plan.groups, *branches)


def seed_views(slot: SlotSpec, kind: int, form: Form, rows: Tensor) -> Tensors:
    """Named parameters ``[M, *shape]`` of seeds of one kind, including the gate's for GATE.

    ``rows [M, width]`` are rows of the slot's store.
    """
    views = slot.layouts[kind].views(rows)
    if form is Form.GATE:
        views |= slot.gate_layout.views(rows[:, slot.gate_offset :])
    return views


def branch(
    slot: SlotSpec,
    kind: int,
    form: Form,
    parameters: Tensors,
    x: Tensor,
    source: Tensor | None = None,
) -> Tensor:
    """``blueprints.branch`` of seeds of one kind; ``parameters`` as returned by ``seed_views``."""
    forward = slot.blueprint(kind).forward
    return blueprints.branch(forward, form, slot.family, parameters, x, source)


class _Take(torch.autograd.Function):
    """Select each group's environments of ``x [B, H, W, N, C]``; isolated groups pass no gradient.

    One function serves all groups, so that backward writes into one buffer instead of adding a
    full-size gradient per group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: tuple[Group, ...]) -> tuple[Tensor, ...]:
        """One tensor ``[B, H, W, m, C]`` per group."""
        ctx.groups, ctx.shape = groups, x.shape
        parts = tuple(x.index_select(3, group.rows) for group in groups)
        constants = [p for p, group in zip(parts, groups, strict=True) if group.isolated]
        ctx.mark_non_differentiable(*constants)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        """Gradient of ``x``, zero where no seed passes one."""
        flowing = [
            (group.rows, gradient)
            for group, gradient in zip(ctx.groups, gradients, strict=True)
            if not group.isolated
        ]
        if not flowing:
            return None, None
        total = flowing[0][1].new_zeros(ctx.shape)
        for rows, gradient in flowing:
            total.index_copy_(3, rows, gradient)
        return total, None


class _Attach(torch.autograd.Function):
    """Add each group's branch times alpha; an isolated branch learns as if alpha were 1.

    For isolated branches this is the straight-through estimator: forward leaves the host's
    activation unchanged, backward passes the output's gradient to the branch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: tuple[Group, ...], *branches: Tensor) -> Tensor:
        """``x`` plus the branches that act."""
        ctx.groups, ctx.dtypes = groups, [f.dtype for f in branches]
        out = x.clone()
        for group, f in zip(groups, branches, strict=True):
            if not group.isolated:
                out.index_add_(3, group.rows, (f * _factor(group, f)).to(x.dtype))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``x`` and of each branch."""
        parts: list[Tensor | None] = [gradient, None]
        for group, dtype in zip(ctx.groups, ctx.dtypes, strict=True):
            part = gradient.index_select(3, group.rows)
            parts.append((part if group.isolated else part * _factor(group, part)).to(dtype))
        return tuple(parts)


def _factor(group: Group, like: Tensor) -> Tensor:
    return group.alpha.to(like.dtype)[:, None]


# Native twin: hosts/loss.h, score_batch.
class _ScoreSums:
    """Sums of scores over validation batches."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: ``logits [R, B, K]``, ``labels [R, B]`` or ``[1, B]``."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probabilities = logits.log_softmax(-1)
        true_class = labels.expand(logits.shape[:2])[..., None]
        log_likelihood = log_probabilities.gather(-1, true_class)[..., 0]
        hits = (logits.argmax(-1) == labels).to(logits.dtype)
        sums = torch.stack([-log_likelihood.sum(1), hits.sum(1), log_likelihood.exp().sum(1)])
        self.sums = sums if self.sums is None else self.sums + sums
        self.count += labels.shape[1]

    def scores(self) -> Scores:
        """Means over all images added."""
        assert self.sums is not None
        return Scores(*(self.sums / self.count))


_IMAGES = 1
"""Key of ``inputs`` for the images of all environments, from which every variant starts."""


class FunctionalBackend(TorchBackend):
    """The torch backend for ``ModuleHost``, with ``torch.vmap`` over the environments.

    Seeds are computed outside of vmap, grouped by kind. An ablated host is computed again from its
    images, because the layers before a slot of a user's module are unknown.
    """

    name = "functional"
    uses_all_threads = True
    """A forward pass stores its parameters in the module, so only one thread computes at a time."""

    host: ModuleHost

    def _resumption(self, slot: int) -> int:
        return _IMAGES

    def _forward(
        self,
        network: Network,
        x: Tensor,
        *,
        training: bool = False,
        start: int = 0,
        inputs: dict[int, Tensor] | None = None,
        watch: Watch | None = None,
        sources: dict[int, Tensor] | None = None,
    ) -> Tensor:
        rows = len(next(iter(network.parameters.values())))
        x = x.expand(-1, -1, -1, rows, -1)
        if inputs is not None:
            inputs[_IMAGES] = x
        grown: dict[int, Callable[[Tensor], Tensor]] = {
            s: partial(self._at_slot, s, network, watch)
            for s, slot_plan in enumerate(network.calls)
            if slot_plan is not None or watch is not None
        }
        return self.host.logits(network.parameters, network.buffers, x, training, grown)
