"""The convolutional host: blocks of convolution, BatchNorm and ReLU, then a linear head.

Slot ``r0cI`` follows block I, before its pool; slot ``r1cI`` follows the pool, if there is one;
slot ``wideI`` spans the layer of block I, see ``NormedHost``.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

from torch import Tensor

from esper.kasmina import ops
from esper.kasmina.blueprints import Span, of_family
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
        layers, blocks = (self.image[2], *self.channels, self.classes), len(self.channels)
        size = self.image[:2]
        for block, channels in enumerate(self.channels):
            depth, pool, last = (block + 1) / blocks, block < self.pools, block == blocks - 1
            slots.append(slot(f"r0c{block}", channels, size, depth))
            if pool:
                size = size[0] // 2, size[1] // 2
                slots.append(slot(f"r1c{block}", channels, size, depth))
            span = Span(block, layers[block], channels, (), self.kernel, pool, last)
            depth, outputs = (block + 0.5) / blocks, layers[block + 2]
            wide = slot(f"wide{block}", outputs, (1, 1) if last else size, depth, span=span)
            # Of the blueprints that the slots accept, none may be units of a layer.
            slots += [wide] if wide.kinds else []
        return tuple(slots)

    @cached_property
    def program(self) -> tuple[Instruction, ...]:
        return self.blocks(
            *(
                (f"r0c{block}", "pool", f"r1c{block}") if block < self.pools else (f"r0c{block}",)
                for block in range(len(self.channels))
            )
        )

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
        """Convolution; see ``BlockHost.block``."""
        return ops.conv2d(x, parameters[f"conv{index}.weight"])
