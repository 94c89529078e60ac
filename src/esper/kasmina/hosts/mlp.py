"""The fully connected host: blocks of a linear map, BatchNorm and ReLU, then a linear head.

Activations have the axes of a convolutional host, with one pixel. Slot ``r0cI`` follows block I,
``wideI`` spans its layer, and ``wide_all`` those of all blocks, see ``NormedHost``.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import prod

from torch import Tensor

from esper.kasmina import ops
from esper.kasmina.blueprints import Span
from esper.kasmina.hosts.host import Instruction, NormedHost, Tensors
from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import Field, weight


@dataclass(frozen=True)
class MlpHost(NormedHost):
    """Specification of stacked fully connected hosts; see ``hosts.host.Host``.

    Attributes:
        widths: output features of each block.
        classes: number of classes.
        image: height, width and channels of an input, which is flattened.
        slot_names: the slots in use; all slots if empty.
    """

    widths: tuple[int, ...]
    classes: int
    image: tuple[int, int, int]
    slot_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError("widths needs one or more numbers, all of them positive")
        if min(self.image) < 1:
            raise ValueError(f"image must have sizes of at least 1, got {self.image}")

    @cached_property
    def all_slots(self) -> tuple[SlotSpec, ...]:
        slots, slot = [], partial(SlotSpec, size=(1, 1), family="mlp")
        layers, blocks = (prod(self.image), *self.widths, self.classes), len(self.widths)
        for block, width in enumerate(self.widths):
            slots.append(slot(f"r0c{block}", width, depth=(block + 1) / blocks))
            span = Span(block, layers[block], width)
            depth = (block + 0.5) / blocks
            slots.append(slot(f"wide{block}", layers[block + 2], depth=depth, span=span))
        if blocks > 1:
            first, *further = self.widths
            span = Span(0, layers[0], first, tuple(further))
            slots.append(slot("wide_all", self.classes, depth=0.5, span=span))
        return tuple(slots)

    @cached_property
    def program(self) -> tuple[Instruction, ...]:
        return self.blocks(*((f"r0c{block}",) for block in range(len(self.widths))))

    @property
    def weights(self) -> tuple[Field, ...]:
        sizes = enumerate(pairwise((prod(self.image), *self.widths)))
        return tuple(weight(f"linear{block}.weight", o, i) for block, (i, o) in sizes)

    @property
    def summary(self) -> str:
        return "mlp " + "-".join(map(str, self.widths))

    def enter(self, images: Tensor) -> Tensor:
        """Flatten pixels and channels to features, ``[B, 1, 1, N, H * W * C]``."""
        return images.permute(0, 3, 1, 2, 4).flatten(2)[:, None, None]

    def block(
        self, parameters: Tensors, buffers: Tensors, index: int, x: Tensor, training: bool
    ) -> Tensor:
        """Linear map; see ``BlockHost.block``."""
        return ops.dense(x, parameters[f"linear{index}.weight"])
