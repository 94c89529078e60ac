"""The interface of hosts, and base classes with the code that most hosts share."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from esper.kasmina import ops
from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import Field, Layout, ones, weight, zeros
from esper.leyline.errors import UsageError

Tensors = dict[str, Tensor]


class Instruction(NamedTuple):
    """One step of a host's forward pass: ``input``, ``block``, ``slot``, ``pool`` or ``head``."""

    kind: str
    number: int


class Host(Protocol):
    """Specification of stacked hosts of one shape; a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def image(self) -> tuple[int, int, int]:
        """Height, width and channels of an input."""
        ...

    @property
    def classes(self) -> int:
        """Number of classes."""
        ...

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of the labels of one input: ``()``, or ``(T,)`` for one prediction per position."""
        ...

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots in use; all slots if empty."""
        ...

    @property
    def all_slots(self) -> tuple[SlotSpec, ...]:
        """All slots of the host, from input to output."""
        ...

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots in use, from input to output."""
        ...

    @property
    def layout(self) -> Layout:
        """Layout of the trainable parameters of one host."""
        ...

    @property
    def buffers(self) -> Layout:
        """Layout of the buffers of one host, such as BatchNorm's running statistics."""
        ...

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Parameters of each block, from input to output; blocks are consecutive in ``layout``."""
        ...

    @property
    def feeding_columns(self) -> tuple[tuple[slice, ...], ...]:
        """For each slot, the columns of ``layout`` with the parameters of the block feeding it."""
        ...

    @property
    def parameter_count(self) -> int:
        """Number of trainable parameters of one host."""
        ...

    @property
    def summary(self) -> str:
        """Kind and widths in a few words."""
        ...


class BlockHost(Host, Protocol):
    """A host that is a chain of blocks, each followed by its slots, and a head.

    Activations are ``[B, H, W, N, C]``.
    """

    @property
    def program(self) -> tuple[Instruction, ...]:
        """The instructions of the forward pass. The number of a slot is its index in ``slots``."""
        ...

    def enter(self, images: Tensor) -> Tensor:
        """Convert images ``[B, H, W, N, C]`` to the input of the first block.

        The environment axis has length 1 if all environments share the images.
        """
        ...

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
        ...

    def head(self, parameters: Tensors, x: Tensor) -> Tensor:
        """Compute the logits of the last activation ``x [B, H, W, N, C]``.

        Returns:
            ``[N, P, classes]``, where P is the number of labels of all B inputs.
        """
        ...


class HostDefaults(ABC):
    """Members that follow from ``all_slots`` and ``layout``, and the labels: one per image."""

    slot_names: tuple[str, ...]

    @property
    @abstractmethod
    def all_slots(self) -> tuple[SlotSpec, ...]:
        """See ``Host.all_slots``."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """See ``Host.layout``."""

    @property
    @abstractmethod
    def feeding_names(self) -> tuple[tuple[str, ...], ...]:
        """For each slot, the names in ``layout`` of the parameters of the block feeding it."""

    @cached_property
    def feeding_columns(self) -> tuple[tuple[slice, ...], ...]:
        """See ``Host.feeding_columns``."""
        fields = zip(self.layout.fields, self.layout.offsets, strict=True)
        ranges = {field.name: (offset, offset + field.size) for field, offset in fields}
        return tuple(
            _joined(sorted(ranges[name] for name in names)) for names in self.feeding_names
        )

    @cached_property
    def slots(self) -> tuple[SlotSpec, ...]:
        """See ``Host.slots``."""
        names = self.slot_names
        return tuple(slot for slot in self.all_slots if not names or slot.name in names)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """One label per image."""
        return ()

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """See ``Host.block_sizes``. A block is a module that has parameters of its own."""
        fields = self.layout.fields
        modules = groupby(fields, key=lambda field: field.name.rpartition(".")[0])
        return tuple(sum(field.size for field in block) for _, block in modules)

    @property
    def parameter_count(self) -> int:
        """See ``Host.parameter_count``."""
        return self.layout.size

    def slot_at(self, place: str) -> Iterator[Instruction]:
        """The instruction of the slot called ``place``, or none if the slot is not in use."""
        return (Instruction("slot", i) for i, slot in enumerate(self.slots) if slot.name == place)


def _joined(ranges: list[tuple[int, int]]) -> tuple[slice, ...]:
    """Slices of sorted column ranges, where adjacent ranges are one slice."""
    joined: list[slice] = []
    for begin, end in ranges:
        if joined and joined[-1].stop == begin:
            begin = joined.pop().start
        joined.append(slice(begin, end))
    return tuple(joined)


def feeding_blocks(program: tuple[Instruction, ...]) -> tuple[int, ...]:
    """For each slot of a program, the last block before it."""
    blocks: list[int] = []
    for kind, number in program:
        if kind == "block":
            block = number
        elif kind == "slot":
            blocks.append(block)
    return tuple(blocks)


class NormedHost(HostDefaults):
    """A host whose blocks end in BatchNorm and ReLU and whose head is one linear map.

    Attributes:
        classes: number of classes.
    """

    classes: int

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
    @abstractmethod
    def program(self) -> tuple[Instruction, ...]:
        """See ``BlockHost.program``."""

    @property
    def feeding_names(self) -> tuple[tuple[str, ...], ...]:
        """See ``HostDefaults.feeding_names``: weight and norm of the block."""
        return tuple(
            (self.weights[block].name, f"norm{block}.weight", f"norm{block}.bias")
            for block in feeding_blocks(self.program)
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
        moved = (
            (self.layout, (self.weights[block].name, f"{norm}.weight", f"{norm}.bias")),
            (self.buffers, (f"{norm}.mean", f"{norm}.variance")),
        )
        found = []
        for layout, names in moved:
            columns = torch.arange(layout.size)
            fields = layout.views(columns[None])
            for name in names:
                fields[name][0].copy_(fields[name][0, list(order)])
            found.append(columns)
        return found[0], found[1]

    def normalised(
        self, parameters: Tensors, buffers: Tensors, index: int, x: Tensor, training: bool
    ) -> Tensor:
        """Apply the BatchNorm of block ``index``, then ReLU."""
        return ops.batch_norm(
            x,
            parameters[f"norm{index}.weight"],
            parameters[f"norm{index}.bias"],
            buffers[f"norm{index}.mean"],
            buffers[f"norm{index}.variance"],
            training,
            rectify=True,
        )

    def head(self, parameters: Tensors, x: Tensor) -> Tensor:
        """A linear map of the mean over the pixels; see ``BlockHost.head``."""
        return ops.linear(ops.mean_pool(x), parameters["head.weight"], parameters["head.bias"])


def resolve_slots(host: Host, names: tuple[str, ...]) -> tuple[str, ...]:
    """Translate ``early``, ``mid`` and ``late``, and check that the host has every named slot.

    The three relative names refer to the slots in use; other names may be any slot of the host.

    Raises:
        UsageError: the host has no slot of a given name.
    """
    available = tuple(slot.name for slot in host.all_slots)
    used = tuple(slot.name for slot in host.slots)
    relative = {"early": used[0], "mid": used[len(used) // 2], "late": used[-1]}
    chosen = tuple(relative.get(name, name) for name in names)
    for name in chosen:
        if name not in available:
            raise UsageError(
                f"slots: the host has no slot {name!r}; choose from "
                f"{', '.join(available)} or early, mid, late"
            )
    return chosen
