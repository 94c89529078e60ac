"""Which groups of channels a module lets become wider, tried in its forward pass."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from esper.kasmina import new_channels
from esper.kasmina.channel_groups import ChannelGroup, channel_groups
from esper.kasmina.nested import tensors
from esper.kasmina.wider_layers import Widening, widen
from esper.leyline.errors import first_line

EXACT = 1e-5
"""Largest difference of outputs, relative to their size, that a widening may make."""


def wider_groups(
    model: nn.Module, run: Callable[[], Any]
) -> tuple[list[ChannelGroup], dict[str, str]]:
    """``channel_groups`` with which the forward pass still computes the same when they are twice as
    wide.

    It does not where a size is written into it, as in ``x.view(-1, 400)``.
    """
    groups, reasons = channel_groups(model, run)
    before, wide = run() if groups else None, dict[tuple[str, ...], ChannelGroup]()
    # Streams last, as those heads join them that are not wider alone.
    for group in sorted(groups, key=lambda each: each.is_balanced):
        if not {name for writers in wide for name in writers}.isdisjoint(group.writers):
            continue
        heads = tuple(x for x in groups if x.writers not in wide and _are_heads(x, group))
        further = [group, *([replace(group, heads=group.heads + heads)] if heads else [])]
        if group.is_balanced and group.silent:
            further += [replace(each, silence=-1.0) for each in further]
        for each in further:
            reason = _problem(model, each, before, run)
            if not reason:
                wide[group.writers] = each
                break
            if reasons.keys().isdisjoint(group.writers):
                reasons.setdefault(group.name, reason)
    parts = [part for group in wide.values() for part, _ in group.parts(0)]
    writers = {name for part in parts for name in part.writers}
    reasons = {name: x for name, x in reasons.items() if name.split(" + ")[0] not in writers}
    writers_in_order = dict.fromkeys(group.writers for group in groups)
    return [wide[each] for each in writers_in_order if each in wide], reasons


def _are_heads(group: ChannelGroup, stream: ChannelGroup) -> bool:
    """Whether a group is that of heads that read and write a stream."""
    writers = {x for x in group.writers if x in group.units}  # others compute positions
    is_beside = stream.readers.keys() >= writers and {*stream.writers} >= {*group.readers}
    return group.attends and stream.is_balanced and is_beside


def _problem(model: nn.Module, group: ChannelGroup, before: Any, run: Callable[[], Any]) -> str:
    """Why a group cannot have twice as many channels; empty if it can."""
    change = Widening()
    try:
        change = widen(model, group, _trial_channels(model, group))
        return "" if equal(before, run()) else "its output would change"
    except Exception as error:
        return (
            "the forward pass takes no more channels, perhaps because they meet others or "
            f"their number is written into it: {first_line(error)}"
        )
    finally:
        change.undo()


def _trial_channels(model: nn.Module, group: ChannelGroup) -> new_channels.NewChannels:
    """As many new channels of a group as it has."""
    generator, count = torch.Generator().manual_seed(0), group.channels
    if group.is_balanced:
        from esper.kasmina import copied_channels  # most have no norm of all channels

        return copied_channels.balanced_channels(model, group, count, generator)
    if not {*group.silent}.isdisjoint(group.writers):  # only one factor of a product is 0
        return new_channels.random_channels(model, group, count, count, generator)
    return new_channels.zero_channels(model, group, count)


def equal(before: object, after: object) -> bool:
    """Whether outputs are the same but for rounding, in half precision to a unit of it."""
    for x, y in zip(tensors(before), tensors(after), strict=True):
        rounding = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
        share = max(EXACT, rounding)
        if not torch.allclose(x.float(), y.float(), rtol=share, atol=share * float(x.abs().max())):
            return False
    return True
