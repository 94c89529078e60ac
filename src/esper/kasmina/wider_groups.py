"""Which groups of channels a module lets become wider, tried in its forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from esper.kasmina.channel_groups import ChannelGroup, channel_groups
from esper.kasmina.nested import tensors
from esper.kasmina.wider_layers import widen, zero_channels
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
    before = run() if groups else None
    for group in list(groups):
        change = widen(model, group, zero_channels(model, group, group.channels))
        try:
            if not equal(before, run()):
                reasons[group.name] = "its output would change"
                groups.remove(group)
        except Exception as error:
            reasons[group.name] = (
                "the forward pass takes no more channels, perhaps because they meet others or "
                f"their number is written into it: {first_line(error)}"
            )
            groups.remove(group)
        finally:
            change.undo()
    return groups, reasons


def equal(before: object, after: object) -> bool:
    """Whether outputs are the same but for rounding, in half precision to a unit of it."""
    for x, y in zip(tensors(before), tensors(after), strict=True):
        rounding = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
        share = max(EXACT, rounding)
        if not torch.allclose(x.float(), y.float(), rtol=share, atol=share * float(x.abs().max())):
            return False
    return True
