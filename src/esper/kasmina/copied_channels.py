"""New channels behind a norm of all channels: copies of those that are there, and what they become.

Copies leave the mean and the mean square of all channels as they are, so the norm does too.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from esper.kasmina.layer_kinds import Recurrent, layer_and_key, layer_at, rows_first, weight_name
from esper.kasmina.new_channels import (
    DIFFERENCE,
    NewChannels,
    joined,
    present_channels,
    random_channels,
    weights_of_inputs,
)

if TYPE_CHECKING:
    from esper.kasmina.channel_groups import ChannelGroup


def channel_copies(model: nn.Module, group: "ChannelGroup", count: int) -> NewChannels:
    """Copies of the channels that are there, all equally often; a silent norm hides them."""
    entries = {}
    for full, x in present_channels(model, group):
        is_silent = layer_and_key(full)[0] in group.silent
        copies = x.repeat(count // len(x), *[1] * (x.ndim - 1))
        entries[full] = torch.full_like(copies, group.silence) if is_silent else copies
    return NewChannels(entries, count)


def substitutes(
    model: nn.Module, group: "ChannelGroup", new: NewChannels, generator: torch.Generator
) -> NewChannels:
    """As many random channels, which are read at random: what copies turn into."""
    draws = random_channels(model, group, new.count, group.channels + new.count, generator)
    entries = dict(joined(model, group, draws, generator).entries)
    for full, x in entries.items():
        if layer_and_key(full)[0] in group.silent:  # the table behind it has weights as large
            entries[full] = torch.lerp(x.new_tensor(group.silence), x, DIFFERENCE)
    heads = tuple(replace(each, generator=generator) for each in new.heads)
    return NewChannels(entries, new.count, heads=heads, generator=generator)


def balanced_channels(
    model: nn.Module, group: "ChannelGroup", count: int, generator: torch.Generator
) -> NewChannels:
    """Copies, which leave mean and mean square over all channels as they are, and new heads.

    The layers behind read differences between the copies of a channel, whose sum is 0: else all
    would learn the same.
    """
    columns = {}
    for name, block in group.readers.items():
        module, tensors = layer_at(model, name)
        key, axes = weight_name(module), group.axes.get(name)
        if key != "weight" and not isinstance(module, Recurrent):
            continue  # of a weight norm they change the others; attention gets new heads
        x = tensors[0][2] if axes is not None else module.get_parameter(key)
        weight = rows_first(module, x, axes=axes).detach()
        parts = count // group.channels
        shape = len(weight), parts, group.channels, block, *weight.shape[2:]
        draws = torch.randn(shape, generator=generator).to(weight)
        draws -= draws.mean(1, keepdim=True)
        draws = (DIFFERENCE * weight.square().mean().sqrt() * draws).flatten(1, 2).cpu()
        # Copies of its rows read as they do.
        times = 1 + parts if name in group.writers else 1
        columns[name] = draws.repeat(times, *[1] * (draws.ndim - 1))
    heads = tuple(_new_heads(model, *each, count, generator) for each in group.parts(count)[1:])
    return replace(channel_copies(model, group, count), columns=columns, heads=heads)


def _new_heads(
    model: nn.Module, group: "ChannelGroup", count: int, inputs: int, generator: torch.Generator
) -> NewChannels:
    """Random heads, which read so many new inputs, too."""
    new, entries = random_channels(model, group, count, group.channels + count, generator), {}
    for name, x in new.entries.items():
        if x.ndim > 3:
            x = torch.cat([x, weights_of_inputs(x, inputs, 3, generator)], 3)
        entries[name] = x
    return replace(new, entries=entries)
