"""What new channels of a group start with: zeros, random weights, or copies of the present ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper.kasmina.layer_kinds import (
    WEIGHT_NORMS,
    Norm,
    Recurrent,
    Table,
    gates_of,
    layer_and_key,
    layer_at,
    reads_itself,
    row_count,
    rows_first,
    sides_of,
    size_names,
    tensors_of,
)

if TYPE_CHECKING:
    from esper.kasmina.channel_groups import ChannelGroup


@dataclass(frozen=True, slots=True)
class NewChannels:
    """What the new channels of a group start with.

    Attributes:
        entries: parameters and buffers of writers and companions, by their full name, with the new
            channels on the first axis; of a recurrent layer ``[channels, gates, ...]``, and
            the columns for its own hidden units end with the old ones, or include the new ones; of
            a writer with units of rows ``[channels, gates, rows, ...]``.
        count: number of new channels.
        columns: weights with which layers read them, by name, ``[outputs, channels, block, ...]``;
            0 where there are none.
        heads: those of the ``heads`` of the group.
        generator: draws the weights with which layers read them instead of ``columns``.
    """

    entries: Mapping[str, Tensor]
    count: int
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    heads: tuple["NewChannels", ...] = ()
    generator: torch.Generator | None = None

    def weights(self, layer: str, x: Tensor, count: int) -> Tensor:
        """So many columns of the weight ``x`` of a layer: those with which it reads them."""
        if self.generator is not None:
            return DIFFERENCE * weights_of_inputs(x, count, 1, self.generator)
        zeros = x.new_zeros(x.shape[0], count, *x.shape[2:])
        return self.columns[layer].to(x).view_as(zeros) if layer in self.columns else zeros

    def choice(self, index: Tensor) -> "NewChannels":
        """Some of these channels, in the memory of the CPU."""
        entries = {name: x[index].cpu() for name, x in self.entries.items()}
        return NewChannels(entries, len(index))


def ends_of(model: nn.Module, group: "ChannelGroup", name: str) -> list[int]:
    """How many channels of a companion or reader there are up to the last one of the group.

    It may have them in several places. They are counted in the model, whose groups may have become
    wider since they were traced.
    """
    ends, end = list[int](), 0
    for writer, length in group.layouts.get(name, ((group.writers[0], 0),)):
        end += channel_count(model, group, writer) if writer else length
        if writer in group.writers:
            ends.append(end)
    return ends


def channel_count(model: nn.Module, group: "ChannelGroup", writer: str = "") -> int:
    """How many channels a writer has now, or each writer of the group."""
    name = writer or group.writers[0]
    module, tensors = layer_at(model, name)
    size = row_count(module, [x for *_, x in tensors], group.axes.get(name))
    return size // prod(group.units.get(name, ()))


def present_channels(model: nn.Module, group: "ChannelGroup") -> Iterator[tuple[str, Tensor]]:
    """Full names of parameters and buffers, and the channels that are there, as in ``entries``."""
    channels = channel_count(model, group)
    for name in (*group.writers, *group.companions):
        module, tensors = layer_at(model, name)
        gates = group.units.get(name, (1, 1))[0] * gates_of(module)
        ends = ends_of(model, group, name) if group.has_places(name) else []
        for full, _, x in tensors:
            rows = rows_first(module, x.detach(), axes=group.axes.get(full))
            rows = torch.cat([rows[end - channels : end] for end in ends]) if ends else rows
            units = rows.unflatten(0, (len(ends) or gates, channels, -1)).transpose(0, 1)
            if name not in group.units and units.shape[2] == 1:
                is_several = isinstance(module, Recurrent) or len(ends) > 1
                units = units.flatten(1, 2) if is_several else units[:, 0, 0]
            yield full, units


DIFFERENCE = 0.3
"""Size of the weights by which copies and what they turn into are read, as a share of that of the
others: an LSTM of four units with a layer norm, copied seven times, has 53 % on noisy digits at 0,
58 at 0.03, 60 at 0.1 and 0.3, and 58 at 1 (six seeds, copies that stay)."""


FACTOR = 0.03
"""Size of new entries of a table whose products with others are summed, as a share of the old ones.

Random factors of few samples each are learned by heart: those of the pixels of digits explain 48 %
at 1, 56 % at 0.3, 59 % at 0.1 and 0.03, 60 % at 0.01, and 53 % from the start (five seeds).
"""


def zero_channels(model: nn.Module, group: "ChannelGroup", count: int) -> NewChannels:
    """So many channels of zeros; where a module is no layer, of the mean of its own."""
    entries = {}
    for full, x in present_channels(model, group):
        name, key = layer_and_key(full)
        # A direction of 0 has no length, and by a scale of 0 a module may divide.
        is_layer = size_names(model.get_submodule(name))
        value = float(key in WEIGHT_NORMS) if is_layer else float(x.float().mean())
        entries[full] = x.new_full((count, *x.shape[1:]), value)
    return NewChannels(entries, count)


def random_channels(
    model: nn.Module, group: "ChannelGroup", count: int, channels: int, generator: torch.Generator
) -> NewChannels:
    """Random channels whose incoming weights are as large as those that are there.

    Scales and positions are spread as they are. Those of a recurrent layer are as large as torch
    draws them, uniformly within C^-1/2, for one of ``channels`` hidden units: as large as trained
    ones of a small layer they generalise worse.
    """
    entries = dict(zero_channels(model, group, count).entries)
    is_product = not {*group.silent}.isdisjoint(group.writers)
    for full, zeros in entries.items():
        name, key = layer_and_key(full)
        if name in group.silent and not group.is_balanced:
            continue  # else the table behind it would read what is new
        layer = model.get_submodule(name)
        old = dict(tensors_of(layer))[key].detach()
        if full not in group.writers and {*size_names(layer)} <= {"normalized_shape"}:
            spread, mean = torch.std_mean(old.float(), correction=0)
            draws = torch.randn(zeros.shape, generator=generator).to(mean)
            entries[full] = (mean + spread * draws).to(zeros)
            continue
        if isinstance(layer, Norm):
            entries[full] = zeros + (1.0 if key in ("weight", "running_var") else 0.0)
            continue
        size = old.square().mean().sqrt()
        if isinstance(layer, Recurrent):
            size = size.new_full((), (3.0 * channels) ** -0.5)
        if key in WEIGHT_NORMS.values() or isinstance(layer, nn.PReLU):
            entries[full] = zeros + size
            continue
        if isinstance(layer, Table) and is_product:
            size *= FACTOR
        entries[full] = torch.randn(zeros.shape, generator=generator).to(old) * size
        if isinstance(layer, Table) and layer.padding_idx is not None:
            entries[full][:, layer.padding_idx] = 0.0
    return NewChannels(entries, count)


def weights_of_inputs(x: Tensor, count: int, axis: int, generator: torch.Generator) -> Tensor:
    """Random weights of so many more inputs, which make those of all as large as ``x`` was."""
    draws = torch.randn(*x.shape[:axis], count, *x.shape[axis + 1 :], generator=generator).to(x)
    share = x.shape[axis] / (x.shape[axis] + count)
    return draws * (share * x.square().mean()).sqrt()


def joined(
    model: nn.Module, group: "ChannelGroup", new: NewChannels, generator: torch.Generator
) -> NewChannels:
    """The channels; those of a recurrent layer read each other."""
    entries = dict(new.entries)
    for full, rows in new.entries.items():
        name, key = layer_and_key(full)
        if reads_itself(model.get_submodule(name), key):
            old = rows.unflatten(2, (sides_of(model.get_submodule(name), key), -1))
            draws = torch.randn(*old.shape[:3], new.count, generator=generator).to(rows)
            size = (3.0 * (group.channels + new.count)) ** -0.5
            entries[full] = torch.cat([old, size * draws], 3).flatten(2)
    return NewChannels(entries, new.count)
