"""The convolutional host: blocks of convolution, BatchNorm and ReLU, then a linear head.

Slot ``r0cI`` follows block I, before its pool; slot ``r1cI`` follows the pool, if there is one.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

from torch import Tensor

from esper.kasmina import ops
from esper.kasmina.blueprints import of_family
from esper.kasmina.hosts.host import Instruction, NormedHost, Tensors
from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import Field, weight
from esper.leyline.actions import BLUEPRINTS


@dataclass(frozen=True)
class CnnHost(NormedHost):
    """Specification of stacked convolutional hosts; see ``hosts.host.Host``.

    Attributes:
        channels: output channels of each block.
        classes: number of classes.
        image: height, width and channels of an input.
        kernel: kernel size of every block, 1 or 3.
        pools: number of initial blocks that end in 2x2 max pooling.
        slot_names: the slots in use; all slots if empty.
        seeds: names of the blueprints that the slots accept; all that fit if empty.

    Raises:
        ValueError: a size or a name is invalid.
    """

    channels: tuple[int, ...]
    classes: int
    image: tuple[int, int, int]
    kernel: int = 3
    pools: int = 0
    slot_names: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.channels or min(self.channels) < 1:
            raise ValueError("channels needs one or more numbers, all of them positive")
        fitting = [BLUEPRINTS[kind] for kind in of_family("conv")]
        unknown = [name for name in self.seeds if name not in fitting]
        if unknown:
            raise ValueError(f"seeds must be among {', '.join(fitting)}, got {unknown[0]!r}")
        if self.kernel not in (1, 3):
            raise ValueError(f"kernel must be 1 or 3, got {self.kernel}")
        if not 0 <= self.pools <= len(self.channels):
            raise ValueError(f"pools must lie in [0, {len(self.channels)}], got {self.pools}")
        if min(self.image[:2]) >> self.pools < 1:
            raise ValueError(
                f"pools must leave at least 1 pixel of {self.image[:2]}, got {self.pools}"
            )

    @cached_property
    def all_slots(self) -> tuple[SlotSpec, ...]:
        slots, slot = [], partial(SlotSpec, accepts=self.seeds)
        height, width, _ = self.image
        for block, channels in enumerate(self.channels):
            depth = (block + 1) / len(self.channels)
            slots.append(slot(f"r0c{block}", channels, (height, width), depth))
            if block < self.pools:
                height, width = height // 2, width // 2
                slots.append(slot(f"r1c{block}", channels, (height, width), depth))
        return tuple(slots)

    @cached_property
    def program(self) -> tuple[Instruction, ...]:
        program = [Instruction("input", 0)]
        for block in range(len(self.channels)):
            program += [Instruction("block", block), *self.slot_at(f"r0c{block}")]
            if block < self.pools:
                program += [Instruction("pool", block), *self.slot_at(f"r1c{block}")]
        return (*program, Instruction("head", 0))

    @property
    def weights(self) -> tuple[Field, ...]:
        sizes = enumerate(pairwise((self.image[2], *self.channels)))
        return tuple(
            weight(f"conv{block}.weight", outputs, inputs, self.kernel, self.kernel)
            for block, (inputs, outputs) in sizes
        )

    @property
    def summary(self) -> str:
        return "conv " + "-".join(map(str, self.channels))

    def enter(self, images: Tensor) -> Tensor:
        """The images, unchanged; see ``BlockHost.enter``."""
        return images

    def block(
        self, parameters: Tensors, buffers: Tensors, index: int, x: Tensor, training: bool
    ) -> Tensor:
        """Convolution, BatchNorm, ReLU; see ``BlockHost.block``."""
        x = ops.conv2d(x, parameters[f"conv{index}.weight"])
        return self.batch_norm(parameters, buffers, index, x, training)
