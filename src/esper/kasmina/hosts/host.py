"""What all hosts have in common, and all that the rest of Esper knows of a host."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

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
    """Specification of a stack of hosts of one shape, a frozen dataclass."""

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
        """Shape of the labels of one input: ``()``, or ``(T,)`` for a prediction a position."""
        ...

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The slots in use, all of them when empty."""
        ...

    @property
    def all_slots(self) -> tuple[SlotSpec, ...]:
        """Every place a seed could grow, from input to output."""
        ...

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots in use, from input to output."""
        ...

    @property
    def layout(self) -> Layout:
        """Trainable parameters of one host."""
        ...

    @property
    def buffers(self) -> Layout:
        """Numbers of one host that no gradient moves, such as BatchNorm's running statistics."""
        ...

    @property
    def parameter_count(self) -> int:
        """Trainable parameters of one host."""
        ...

    @property
    def summary(self) -> str:
        """Kind and widths in a word or two."""
        ...


class BlockHost(Host, Protocol):
    """A host that is a chain of blocks, with slots behind them, that ends in a head.

    Activations are ``[B, H, W, N, C]``.
    """

    @property
    def program(self) -> tuple[Instruction, ...]:
        """The forward pass, instruction by instruction. A slot's number indexes ``slots``."""
        ...

    def enter(self, images: Tensor) -> Tensor:
        """Images ``[B, H, W, N, C]`` as the first block takes them.

        The axis of environments has length 1 where all share the images.
        """
        ...

    def block(
        self, parameters: Tensors, buffers: Tensors, index: int, x: Tensor, training: bool
    ) -> Tensor:
        """Block ``index`` of N hosts.

        Args:
            parameters: of ``layout``, ``[N, *shape]``.
            buffers: of ``buffers``, ``[N, *shape]``; updated in training.
            index: of the block.
            x: ``[B, H, W, N, C]``; the first block also takes ``[B, H, W, 1, C]``.
            training: whether to normalise by the batch.
        """
        ...

    def head(self, parameters: Tensors, x: Tensor) -> Tensor:
        """Logits of the last activation ``x [B, H, W, N, C]``.

        Returns:
            ``[N, P, classes]``, with P the labels of the B inputs one after another.
        """
        ...


class HostDefaults(ABC):
    """What follows from the rest of a host, and labels as most hosts have them."""

    slot_names: tuple[str, ...]

    @property
    @abstractmethod
    def all_slots(self) -> tuple[SlotSpec, ...]:
        """See ``Host.all_slots``."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """See ``Host.layout``."""

    @cached_property
    def slots(self) -> tuple[SlotSpec, ...]:
        """See ``Host.slots``."""
        names = self.slot_names
        return tuple(slot for slot in self.all_slots if not names or slot.name in names)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """One label an image."""
        return ()

    @property
    def parameter_count(self) -> int:
        """See ``Host.parameter_count``."""
        return self.layout.size

    def slot_at(self, place: str) -> Iterator[Instruction]:
        """The slot called ``place`` as an instruction, if it is in use."""
        return (Instruction("slot", i) for i, slot in enumerate(self.slots) if slot.name == place)


class NormedHost(HostDefaults):
    """A host whose blocks end in BatchNorm and ReLU, with one linear map behind the last of them.

    Attributes:
        classes: number of classes.
    """

    classes: int

    @property
    @abstractmethod
    def weights(self) -> tuple[Field, ...]:
        """What is trained of each block besides its norm, ``[out, ...]``."""

    @cached_property
    def layout(self) -> Layout:
        """See ``Host.layout``. BatchNorm takes away what a bias would add, so there is none."""
        fields: list[Field] = []
        for block, own in enumerate(self.weights):
            width = own.shape[0]
            fields += [own, ones(f"norm{block}.weight", width), zeros(f"norm{block}.bias", width)]
        fields += [weight("head.weight", self.classes, width), zeros("head.bias", self.classes)]
        return Layout(tuple(fields))

    @cached_property
    def buffers(self) -> Layout:
        """See ``Host.buffers``: running statistics."""
        fields: list[Field] = []
        for block, own in enumerate(self.weights):
            width = own.shape[0]
            fields += [zeros(f"norm{block}.mean", width), ones(f"norm{block}.variance", width)]
        return Layout(tuple(fields))

    def normalised(
        self, parameters: Tensors, buffers: Tensors, index: int, x: Tensor, training: bool
    ) -> Tensor:
        """BatchNorm of block ``index``, then ReLU."""
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
        """The linear map of the mean over the pixels; see ``BlockHost.head``."""
        return ops.linear(ops.mean_pool(x), parameters["head.weight"], parameters["head.bias"])


def resolve_slots(host: Host, names: tuple[str, ...]) -> tuple[str, ...]:
    """Translate ``early``, ``mid`` and ``late`` and check that the host has every slot.

    Those three are among the slots in use; any slot of the host may be named.

    Raises:
        UsageError: a name that the host does not have.
    """
    available = tuple(slot.name for slot in host.all_slots)
    own = tuple(slot.name for slot in host.slots)
    relative = {"early": own[0], "mid": own[len(own) // 2], "late": own[-1]}
    chosen = tuple(relative.get(name, name) for name in names)
    for name in chosen:
        if name not in available:
            raise UsageError(
                f"slots: the host has no slot {name!r}; choose from "
                f"{', '.join(available)} or early, mid, late"
            )
    return chosen
