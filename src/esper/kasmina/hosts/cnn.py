"""The convolutional host: blocks of convolution, BatchNorm and ReLU, then a linear head.

Slot ``r0cI`` lies behind block I before its pool, slot ``r1cI`` behind the pool where there is one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import Field, Layout, ones, weight, zeros
from esper.leyline.errors import UsageError


class Instruction(NamedTuple):
    """One step of a host's forward pass: ``block``, ``slot``, ``pool`` or ``head``."""

    kind: str
    number: int


@dataclass(frozen=True)
class CnnHost:
    """Specification of a stack of convolutional hosts.

    Attributes:
        channels: output channels of each block.
        classes: number of classes.
        image: height, width and channels of an input.
        kernel: kernel size of every block, 1 or 3.
        pools: how many of the first blocks end in 2x2 max pooling.
        slot_names: the slots in use, all of them when empty.
    """

    channels: tuple[int, ...]
    classes: int
    image: tuple[int, int, int]
    kernel: int = 3
    pools: int = 0
    slot_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.channels or min(self.channels) < 1:
            raise ValueError("channels needs at least one positive number")
        if self.kernel not in (1, 3):
            raise ValueError(f"kernel must be 1 or 3, got {self.kernel}")
        if not 0 <= self.pools <= len(self.channels):
            raise ValueError(f"pools must lie in [0, {len(self.channels)}], got {self.pools}")
        if min(self.image[:2]) >> self.pools < 1:
            raise ValueError(f"{self.pools} pools leave nothing of an image of {self.image[:2]}")

    @cached_property
    def all_slots(self) -> tuple[SlotSpec, ...]:
        """Every place a seed could grow, from input to output."""
        slots = []
        height, width, _ = self.image
        for block, channels in enumerate(self.channels):
            depth = (block + 1) / len(self.channels)
            slots.append(SlotSpec(f"r0c{block}", channels, (height, width), depth))
            if block < self.pools:
                height, width = height // 2, width // 2
                slots.append(SlotSpec(f"r1c{block}", channels, (height, width), depth))
        return tuple(slots)

    @cached_property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots in use, from input to output."""
        chosen = self.slot_names or tuple(slot.name for slot in self.all_slots)
        return tuple(slot for slot in self.all_slots if slot.name in chosen)

    @cached_property
    def program(self) -> tuple[Instruction, ...]:
        """The forward pass, instruction by instruction."""
        index = {slot.name: i for i, slot in enumerate(self.slots)}
        program = []
        for block in range(len(self.channels)):
            program.append(Instruction("block", block))
            if f"r0c{block}" in index:
                program.append(Instruction("slot", index[f"r0c{block}"]))
            if block < self.pools:
                program.append(Instruction("pool", block))
                if f"r1c{block}" in index:
                    program.append(Instruction("slot", index[f"r1c{block}"]))
        return (*program, Instruction("head", 0))

    @cached_property
    def layout(self) -> Layout:
        """Trainable parameters of one host."""
        fields: list[Field] = []
        inputs = self.image[2]
        for block, channels in enumerate(self.channels):
            fields += [
                weight(f"conv{block}.weight", channels, inputs, self.kernel, self.kernel),
                ones(f"norm{block}.weight", channels),
                zeros(f"norm{block}.bias", channels),
            ]
            inputs = channels
        fields += [weight("head.weight", self.classes, inputs), zeros("head.bias", self.classes)]
        return Layout(tuple(fields))

    @cached_property
    def buffers(self) -> Layout:
        """BatchNorm's running statistics of one host."""
        fields: list[Field] = []
        for block, channels in enumerate(self.channels):
            fields += [
                zeros(f"norm{block}.mean", channels),
                ones(f"norm{block}.variance", channels),
            ]
        return Layout(tuple(fields))

    @property
    def parameter_count(self) -> int:
        return self.layout.size


def resolve_slots(host: CnnHost, names: tuple[str, ...]) -> tuple[str, ...]:
    """Translate ``early``, ``mid`` and ``late`` and check that the host has every slot.

    Raises:
        UsageError: a name that the host does not have.
    """
    available = tuple(slot.name for slot in host.all_slots)
    relative = {
        "early": available[0],
        "mid": available[len(available) // 2],
        "late": available[-1],
    }
    chosen = tuple(relative.get(name, name) for name in names)
    for name in chosen:
        if name not in available:
            raise UsageError(
                f"slots: the host has no slot {name!r}; choose from "
                f"{', '.join(available)} or early, mid, late"
            )
    return chosen
