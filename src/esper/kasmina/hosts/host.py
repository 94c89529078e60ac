"""The interface of hosts, and base classes with the code that most hosts share."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from esper.kasmina import ops
from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import Field, Layout, ones, weight, zeros
from esper.leyline.errors import UsageError

Tensors = dict[str, Tensor]


class Instruction(NamedTuple):
    """One step of a host's forward pass.

    ``kind`` is ``input``, ``block``, ``norm``, ``slot``, ``pool`` or ``head``.
    """

    kind: str
    number: int


class Host(ABC):
    """Specification of stacked hosts of one shape; a frozen dataclass.

    Attributes:
        image: height, width and channels of an input.
        classes: number of classes.
        slot_names: names of the slots in use; if empty, all that do not span a layer.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    image: tuple[int, int, int]
    classes: int
    slot_names: tuple[str, ...]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of the labels of one input: ``()``, or ``(T,)`` for one prediction per position."""
        return ()

    @property
    @abstractmethod
    def all_slots(self) -> tuple[SlotSpec, ...]:
        """All slots of the host, from input to output."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Layout of the trainable parameters of one host."""

    @property
    @abstractmethod
    def buffers(self) -> Layout:
        """Layout of the buffers of one host, such as BatchNorm's running statistics."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """Kind and widths in a few words."""

    @property
    @abstractmethod
    def feeding_names(self) -> tuple[tuple[str, ...], ...]:
        """For each slot, the names in ``layout`` of the parameters of the block feeding it."""

    @cached_property
    def feeding_columns(self) -> tuple[tuple[slice, ...], ...]:
        """For each slot, the columns of ``layout`` with the parameters of the block feeding it."""
        fields = zip(self.layout.fields, self.layout.offsets, strict=True)
        ranges = {field.name: (offset, offset + field.size) for field, offset in fields}
        return tuple(
            _slices(sorted(ranges[name] for name in names)) for names in self.feeding_names
        )

    @cached_property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots in use, from input to output."""
        names = self.slot_names or [slot.name for slot in self.all_slots if slot.span is None]
        return tuple(slot for slot in self.all_slots if slot.name in names)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Parameters of each block, from input to output; blocks are consecutive in ``layout``.

        A block is a module that has parameters of its own.
        """
        fields = self.layout.fields
        modules = groupby(fields, key=lambda field: field.name.rpartition(".")[0])
        return tuple(sum(field.size for field in block) for _, block in modules)

    @property
    def parameter_count(self) -> int:
        """Number of trainable parameters of one host."""
        return self.layout.size


class BlockHost(Host):
    """A host that is a chain of blocks, each followed by its slots, and a head.

    Activations are ``[B, H, W, N, C]``.
    """

    @property
    @abstractmethod
    def program(self) -> tuple[Instruction, ...]:
        """The instructions of the forward pass. The number of a slot is its index in ``slots``."""

    @abstractmethod
    def enter(self, images: Tensor) -> Tensor:
        """Convert images ``[B, H, W, N, C]`` to the input of the first block.

        The environment axis has length 1 if all environments share the images.
        """

    @abstractmethod
    def block(
        self, parameters: Tensors, buffers: Tensors, index: int, x: Tensor, training: bool
    ) -> Tensor:
        """Compute block ``index`` of N hosts.

        Args:
            parameters: by the names of ``layout``, ``[N, *shape]`` each.
            buffers: by the names of ``buffers``, ``[N, *shape]`` each; updated in training.
            index: number of the block.
            x: ``[B, H, W, N, C]``; the first block also accepts ``[B, H, W, 1, C]``.
            training: whether to normalise by the statistics of the batch.
        """

    @abstractmethod
    def head(self, parameters: Tensors, x: Tensor) -> Tensor:
        """Compute the logits of the last activation ``x [B, H, W, N, C]``.

        Returns:
            ``[N, P, classes]``, where P is the number of labels of all B inputs.
        """

    def compute(
        self,
        instruction: Instruction,
        parameters: Tensors,
        buffers: Tensors,
        x: Tensor,
        training: bool,
    ) -> Tensor:
        """``x`` after an instruction other than ``slot``; see ``block`` and ``head``."""
        kind, number = instruction
        if kind == "input":
            return self.enter(x)
        if kind == "block":
            return self.block(parameters, buffers, number, x, training)
        return ops.max_pool(x) if kind == "pool" else self.head(parameters, x)

    def slot_at(self, name: str) -> Iterator[Instruction]:
        """The instruction of the slot called ``name``, or none if the slot is not in use."""
        return (Instruction("slot", i) for i, slot in enumerate(self.slots) if slot.name == name)

    @property
    def feeding_blocks(self) -> tuple[int, ...]:
        """For each slot, the last block before it, or the one that it spans."""
        blocks: list[int] = []
        for kind, number in self.program:
            if kind == "block":
                block = number
            elif kind == "slot":
                span = self.slots[number].span
                blocks.append(block if span is None else span.block)
        return tuple(blocks)


def _slices(ranges: list[tuple[int, int]]) -> tuple[slice, ...]:
    """Slices of sorted column ranges, where adjacent ranges are one slice."""
    slices: list[slice] = []
    for begin, end in ranges:
        if slices and slices[-1].stop == begin:
            begin = slices.pop().start
        slices.append(slice(begin, end))
    return tuple(slices)


class NormedHost(BlockHost):
    """A host whose blocks end in BatchNorm and ReLU and whose head is one linear map.

    The slot ``wideI`` spans the layer of block I: its seeds read the input of the block, and add to
    the layer of the next block before its norm, or to the logits. ``wide_all`` spans the layers of
    all blocks.
    """

    @property
    @abstractmethod
    def weights(self) -> tuple[Field, ...]:
        """The weight of each block, ``[out, ...]``, without its norm."""

    @cached_property
    def layout(self) -> Layout:
        """See ``Host.layout``. Blocks have no bias, because BatchNorm would cancel it."""
        fields: list[Field] = []
        for block, field in enumerate(self.weights):
            width = field.shape[0]
            fields += [field, ones(f"norm{block}.weight", width), zeros(f"norm{block}.bias", width)]
        fields += [weight("head.weight", self.classes, width), zeros("head.bias", self.classes)]
        return Layout(tuple(fields))

    @property
    def feeding_names(self) -> tuple[tuple[str, ...], ...]:
        """See ``Host.feeding_names``: weight and norm of the block."""
        return tuple(
            (self.weights[block].name, f"norm{block}.weight", f"norm{block}.bias")
            for block in self.feeding_blocks
        )

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """See ``Host.block_sizes``. A block has a weight and its norm; the head is the last one."""
        sizes = [field.size + 2 * field.shape[0] for field in self.weights]
        return (*sizes, self.layout.size - sum(sizes))

    @cached_property
    def buffers(self) -> Layout:
        """See ``Host.buffers``: the running statistics of each block."""
        fields: list[Field] = []
        for block, field in enumerate(self.weights):
            width = field.shape[0]
            fields += [zeros(f"norm{block}.mean", width), ones(f"norm{block}.variance", width)]
        return Layout(tuple(fields))

    def channels_moved(self, block: int, order: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Columns of ``layout`` and of ``buffers`` that give a host with the channels in an order.

        Args:
            block: number of the block.
            order: for each output channel of the block, the one that moves to its place.

        Returns:
            Indices that gather a row's parameters, int64 ``[P]``, and its buffers, int64 ``[Q]``.
        """
        norm = f"norm{block}"
        parts = (
            (self.layout, (self.weights[block].name, f"{norm}.weight", f"{norm}.bias")),
            (self.buffers, (f"{norm}.mean", f"{norm}.variance")),
        )
        indices = []
        for layout, names in parts:
            columns = torch.arange(layout.size)
            fields = layout.views(columns[None])
            for name in names:
                fields[name][0].copy_(fields[name][0, list(order)])
            indices.append(columns)
        return indices[0], indices[1]

    def blocks(self, *after: tuple[str, ...]) -> tuple[Instruction, ...]:
        """The program of a chain of blocks and the head.

        Args:
            after: for each block, what follows its norm: names of slots, and ``pool``.
        """
        program = [Instruction("input", 0)]
        for block, names in enumerate(after):
            program.append(Instruction("block", block))
            if block:
                program += self.slot_at(f"wide{block - 1}")
            program.append(Instruction("norm", block))
            for name in names:
                pool = [Instruction("pool", block)]
                program += pool if name == "pool" else self.slot_at(name)
        ends = (f"wide{block}", "wide_all")
        return (*program, Instruction("head", 0), *chain.from_iterable(map(self.slot_at, ends)))

    def compute(
        self,
        instruction: Instruction,
        parameters: Tensors,
        buffers: Tensors,
        x: Tensor,
        training: bool,
    ) -> Tensor:
        """See ``BlockHost.compute``."""
        if instruction.kind == "norm":
            return self.norm(parameters, buffers, instruction.number, x, training)
        return super().compute(instruction, parameters, buffers, x, training)

    def norm(
        self, parameters: Tensors, buffers: Tensors, index: int, x: Tensor, training: bool
    ) -> Tensor:
        """The BatchNorm of block ``index``, then ReLU; arguments as for ``block``."""
        return ops.batch_norm(
            x, parameters[f"norm{index}.weight"], parameters[f"norm{index}.bias"],
            buffers[f"norm{index}.mean"], buffers[f"norm{index}.variance"], training, rectify=True,
        )  # fmt: skip

    def head(self, parameters: Tensors, x: Tensor) -> Tensor:
        """A linear map of the mean over the pixels; see ``BlockHost.head``."""
        return ops.linear(ops.mean_pool(x), parameters["head.weight"], parameters["head.bias"])


def resolve_slots(host: Host, names: tuple[str, ...]) -> tuple[str, ...]:
    """Translate relative names, and check that the host has every named slot.

    ``early``, ``mid`` and ``late`` refer to the slots in use, ``wide`` stands for all slots that
    span a layer; other names may be any slot of the host.

    Raises:
        UsageError: the host has no slot of a given name.
    """
    available = tuple(slot.name for slot in host.all_slots)
    active = tuple(slot.name for slot in host.slots)
    wide = tuple(slot.name for slot in host.all_slots if slot.span is not None)
    relative = {
        "early": (active[0],),
        "mid": (active[len(active) // 2],),
        "late": (active[-1],),
        "wide": wide or ("wide",),
    }
    slots = tuple(chain.from_iterable(relative.get(name, (name,)) for name in names))
    for name in slots:
        if name not in available:
            raise UsageError(
                f"slots: the host has no slot {name!r}; choose from "
                f"{', '.join(available)} or early, mid, late{', wide' if wide else ''}"
            )
    return slots
