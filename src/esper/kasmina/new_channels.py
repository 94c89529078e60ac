"""What new channels of a group start with: zeros, random weights, or sums of the present ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from esper.kasmina.layer_kinds import (
    WEIGHT_NORMS,
    Norm,
    gates_of,
    layer_and_key,
    layer_at,
    rows_first,
    size_names,
    tensors_of,
    weight_name,
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
        mixture: of which of the channels that are there they are sums, ``[count, channels]``; None
            where they are others.
        columns: weights with which layers read them, by name, ``[outputs, channels, block, ...]``;
            0 where there are none.
        heads: those of the ``heads`` of the group.
    """

    entries: Mapping[str, Tensor]
    count: int
    mixture: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    heads: tuple["NewChannels", ...] = ()

    def choice(self, index: Tensor) -> "NewChannels":
        """Some of these channels, in the memory of the CPU."""
        entries = {name: x[index].cpu() for name, x in self.entries.items()}
        return NewChannels(entries, len(index))


def end_of(model: nn.Module, group: "ChannelGroup", name: str) -> int:
    """How many channels of a companion or reader there are up to the last one of the group.

    They are counted in the model, whose groups may have become wider since they were found.
    """
    end = 0
    for writer, length in group.layouts.get(name, ((group.writers[0], 0),)):
        end += channel_count(model, group, writer) if writer else length
        if writer in group.writers:
            break
    return end


def channel_count(model: nn.Module, group: "ChannelGroup", writer: str = "") -> int:
    """How many channels a writer has now, or each writer of the group."""
    name = writer or group.writers[0]
    module = model.get_submodule(name)
    size: int = getattr(module, size_names(module)[0])
    return size // prod(group.units.get(name, ()))


def _present(model: nn.Module, group: "ChannelGroup") -> Iterator[tuple[str, Tensor]]:
    """Full names of parameters and buffers, and the channels that are there, as in ``entries``."""
    channels = channel_count(model, group)
    for name in (*group.writers, *group.companions):
        module, tensors = layer_at(model, name)
        gates = group.units.get(name, (1, 1))[0] * gates_of(module)
        end = end_of(model, group, name) if name in group.layouts else None
        for full, _, x in tensors:
            rows = rows_first(module, x.detach())
            rows = rows if end is None else rows[end - channels : end]
            units = rows.unflatten(0, (gates, channels, -1)).transpose(0, 1)
            if name not in group.units and units.shape[2] == 1:
                units = units.flatten(1, 2) if isinstance(module, nn.RNNBase) else units[:, 0, 0]
            yield full, units


DIFFERENCE = 0.3
"""Size of the weights by which equal channels are read, as a share of that of the others: an LSTM
of four units with a layer norm, copied seven times, has 53 % on noisy digits at 0, 58 at 0.03, 60
at 0.1 and 0.3, and 58 at 1 (six seeds), a perceptron with layer norms 61.8 at 0, 62.3 at 0.15, 63.0
at 0.3, 62.4 at 0.5 and 61.9 at 1 (thirty)."""


def channel_sums(model: nn.Module, group: "ChannelGroup", mixture: Tensor) -> NewChannels:
    """Channels that are sums of those that are there, ``mixture [count, channels]``.

    Behind a silent norm those of a pair, see ``moment_mixture``, have opposite signs.
    """
    entries, part = {}, torch.arange(len(mixture)) // group.channels
    signs = (1 - 2 * (part % 2)) * (part // 2 < len(mixture) // group.channels // 2)
    for full, x in _present(model, group):
        kind = torch.promote_types(x.dtype, torch.float64)  # which not every device has
        sums = mixture.to(kind) @ x.cpu().to(kind).reshape(len(x), -1)
        if layer_and_key(full)[0] in group.silent:
            sums *= DIFFERENCE * signs[:, None]
        entries[full] = sums.to(x.dtype).view(-1, *x.shape[1:])
    return NewChannels(entries, len(mixture), mixture)


def zero_channels(model: nn.Module, group: "ChannelGroup", count: int) -> NewChannels:
    """So many channels of zeros; where a module is no layer, of the mean of its own."""
    entries = {}
    for full, x in _present(model, group):
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

    Those of a recurrent layer are as large as torch draws them, uniformly within C^-1/2, for one of
    ``channels`` hidden units: as large as trained ones of a small layer they generalise worse.
    """
    entries = dict(zero_channels(model, group, count).entries)
    for full, zeros in entries.items():
        name, key = layer_and_key(full)
        layer = model.get_submodule(name)
        if not size_names(layer):
            continue  # the mean over those that are there
        if isinstance(layer, Norm):
            entries[full] = zeros + (1.0 if key in ("weight", "running_var") else 0.0)
            continue
        old = dict(tensors_of(layer))[key].detach()
        size = old.square().mean().sqrt()
        if isinstance(layer, nn.RNNBase):
            size = size.new_full((), (3.0 * channels) ** -0.5)
        if key in WEIGHT_NORMS.values() or isinstance(layer, nn.PReLU):
            entries[full] = zeros + size
            continue
        entries[full] = torch.randn(zeros.shape, generator=generator).to(old) * size
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            entries[full][:, layer.padding_idx] = 0.0
    return NewChannels(entries, count)


def balanced_channels(
    model: nn.Module, group: "ChannelGroup", count: int, generator: torch.Generator
) -> NewChannels:
    """Mixtures or copies behind a norm of all channels, see ``moment_mixture``.

    The layers behind read differences between the copies of a channel, or the two of a pair of
    mixtures, whose sum is 0: else copies would learn the same, and mixtures would begin unread.
    """
    sums = channel_sums(model, group, moment_mixture(group, count, generator))
    columns = {}
    for name, block in group.readers.items():
        module = model.get_submodule(name)
        if weight_name(module) != "weight":
            continue  # of a weight norm they change the others; attention gets new heads
        weight = rows_first(module, module.get_parameter("weight")).detach()
        shape = len(weight), count // group.channels, group.channels, block, *weight.shape[2:]
        draws = torch.randn(shape, generator=generator).to(weight)
        equal = draws.split(2 if group.origin == "mixtures" else shape[1], 1)
        differences = torch.cat([each - each.mean(1, keepdim=True) for each in equal], 1)
        differences *= DIFFERENCE * weight.square().mean().sqrt()
        columns[name] = differences.flatten(1, 2).cpu()
        if name in group.writers and sums.mixture is not None:  # sums of its rows read as they do
            rows = sums.mixture.to(weight.dtype) @ columns[name].flatten(1)
            columns[name] = torch.cat([columns[name], rows.unflatten(1, columns[name].shape[1:])])
    heads = tuple(_new_heads(model, *each, count, generator) for each in group.parts(count)[1:])
    return replace(sums, columns=columns, heads=heads)


def _new_heads(
    model: nn.Module, group: "ChannelGroup", count: int, inputs: int, generator: torch.Generator
) -> NewChannels:
    """Random heads, with weights of 0 for so many new inputs: none of them says more at first."""
    new = random_channels(model, group, count, group.channels + count, generator)
    sides = {name: (*[0] * 2 * (x.ndim - 4), 0, inputs) for name, x in new.entries.items()}
    entries = {name: pad(x, sides[name]) if x.ndim > 3 else x for name, x in new.entries.items()}
    return replace(new, entries=entries)


def moment_mixture(group: "ChannelGroup", count: int, generator: torch.Generator) -> Tensor:
    """A mixture that leaves mean and mean square over all channels as they are, ``[count, C]``.

    ``count`` is a multiple of the C channels. Copies do; so do products with orthogonal matrices
    that leave the sum as it is, which are other functions of the input and learn faster. Each of
    these comes twice, as a pair, but for a last one.
    """
    size, parts = group.channels, list[Tensor]()
    for index in range(count // size):
        draws = torch.randn(2, size, size, generator=generator, dtype=torch.float64)
        if index % 2:
            parts.append(parts[-1])
            continue
        draws[0, :, 0] = 1.0  # the direction that stays
        basis, rotation = torch.linalg.qr(draws[0])[0], torch.eye(size, dtype=torch.float64)
        rotation[1:, 1:] = torch.linalg.qr(draws[1, 1:, 1:])[0]
        parts.append(basis @ rotation @ basis.T if group.origin == "mixtures" else torch.eye(size))
    return torch.cat(parts)
