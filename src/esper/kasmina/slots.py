"""Slots: the places in a host where seeds can grow, and the parameter layout of a seed there."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from esper.kasmina import blueprints
from esper.kasmina.blueprints import Blueprint, LastLayer, Span
from esper.kasmina.stack import Layout
from esper.kasmina.transfer import Table, moved
from esper.leyline.actions import BLUEPRINTS, Style


@dataclass(frozen=True)
class SlotSpec:
    """A place where a seed can grow.

    Attributes:
        name: name by which the user selects the slot, such as ``r0c1``.
        channels: channels of the activation at the slot.
        size: height and width of the activation.
        depth: position of the slot between input and output, in (0, 1].
        family: family of blueprints for the slot, one of ``blueprints.FAMILIES``.
        accepts: names of the blueprints of the family that can live here; all of them if empty.
        span: the layer that seeds here make wider; they then read what it reads, and the activation
            at the slot is what the next layer computes before its norm. None in other slots.
    """

    name: str
    channels: int
    size: tuple[int, int]
    depth: float
    family: str = "conv"
    accepts: tuple[str, ...] = ()
    span: Span | None = None

    @property
    def summary(self) -> str:
        """One line about the slot: its activation, and the parameters of each blueprint there."""
        sizes = ", ".join(f"{BLUEPRINTS[kind]} {self.layouts[kind].size:,}" for kind in self.kinds)
        height, width = self.size
        shape = f"{self.channels} channels"
        if self.span is not None:
            widths = [str(units) for units in (self.span.units, *self.span.further)]
            layer = "layers" if self.span.further else "a layer"
            shape = f"{layer} of {' and '.join(widths)} channels"
        elif self.family == "conv":
            shape += f" of {height}x{width}"
        return f"{self.name}: {shape}; parameters of {sizes}"

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Indices of the blueprints that can live here."""
        fitting = blueprints.of_family(self.family)
        if self.span is not None:
            names = blueprints.ADDED_UNITS[self.family]
            fitting = tuple(kind for kind in fitting if BLUEPRINTS[kind] in names)
        return tuple(k for k in fitting if not self.accepts or BLUEPRINTS[k] in self.accepts)

    def blueprint(self, kind: int) -> Blueprint:
        """The blueprint with index ``kind`` in the blueprint head, for this slot."""
        return blueprints.build(kind, self.channels, self.family, self.span)

    @cached_property
    def layouts(self) -> dict[int, Layout]:
        """Layout of a row of the slot's store per blueprint, without the gate."""
        return {kind: Layout(self.blueprint(kind).fields) for kind in self.kinds}

    @cached_property
    def last_layers(self) -> frozenset[LastLayer]:
        """What newborn seeds of the slot's blueprints may read."""
        return frozenset(self.blueprint(kind).last_layer for kind in self.kinds)

    @cached_property
    def gate_layout(self) -> Layout:
        """Layout of the gate of style GATED_GATE."""
        return Layout(blueprints.gate_fields(self.channels))

    @cached_property
    def gate_offset(self) -> int:
        """First column of the gate, the same for all blueprints."""
        return max(layout.size for layout in self.layouts.values())

    @property
    def width(self) -> int:
        """Number of columns of the slot's store."""
        return self.gate_offset + self.gate_layout.size

    @cached_property
    def parameter_table(self) -> Tensor:
        """Parameter count of a seed by blueprint and style, int64 ``[blueprints, styles]``."""
        table = torch.zeros(len(BLUEPRINTS), len(Style), dtype=torch.long)
        for kind, layout in self.layouts.items():
            table[kind] = layout.size
            table[kind, Style.GATED_GATE] += self.gate_layout.size
        return table

    @cached_property
    def initial_distribution_table(self) -> tuple[Tensor, Tensor]:
        """Initial constant and bound of each column, float64 ``[blueprints, width]`` each."""
        constant = torch.zeros(len(BLUEPRINTS), self.width, dtype=torch.float64)
        bound = torch.zeros_like(constant)
        for kind, layout in self.layouts.items():
            constant[kind], bound[kind] = layout.initial_distribution(self.width)
        gate, columns = self.gate_layout, slice(self.gate_offset, None)
        constant[:, columns], bound[:, columns] = gate.initial_distribution(gate.size)
        return constant, bound

    @cached_property
    def segment_table(self) -> Table:
        """The parameter tensor of each column by blueprint, int64 ``[blueprints, width]``.

        Unused columns and those of the gate have the index ``segment_count``.
        """
        table = torch.full((len(BLUEPRINTS), self.width), self.segment_count)
        for kind, layout in self.layouts.items():
            table[kind, : layout.size] = layout.segments(layout.size)
        return Table(table.tolist())

    @cached_property
    def segment_count(self) -> int:
        """Largest number of parameter tensors of any blueprint in this slot."""
        return max(len(layout.fields) for layout in self.layouts.values())

    @cached_property
    def tensor_counts(self) -> tuple[int, ...]:
        """Number of parameter tensors by blueprint, at least 1."""
        counts = [1] * len(BLUEPRINTS)
        for kind, layout in self.layouts.items():
            counts[kind] = len(layout.fields)
        return tuple(counts)


@cache
def initial_distribution_on(slot: SlotSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """``SlotSpec.initial_distribution_table`` on ``device``, copied there once."""
    with torch.inference_mode(False):
        constant, bound = (moved(table, device) for table in slot.initial_distribution_table)
    return constant, bound


def stack_tables(slots: tuple[SlotSpec, ...], attribute: str) -> Tensor:
    """Stack a table of all slots along a new first axis."""
    return torch.stack([getattr(slot, attribute) for slot in slots])


Grown = Callable[[Tensor], Tensor]
"""Maps the activation before a slot to the activation after it, with the seeds applied."""


class Slot(nn.Module):
    """Marks a place in a module where a seed can grow; the identity without seeds.

    Args:
        channels: channels of the activation, which is ``[B, C, H, W]`` (for convolutional
            blueprints) or ``[B, C]`` (for fully connected ones).
    """

    def __init__(self, channels: int):
        super().__init__()
        self.channels = channels
        self.grown: Grown | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The activation ``x``, changed by the seeds in this slot."""
        return x if self.grown is None else self.grown(x)
