"""Which groups of channels a module lets become wider, tried in its forward pass."""

from collections.abc import Callable
from typing import Any

from torch import nn

from esper.kasmina.channel_groups import ChannelGroup, channel_groups
from esper.kasmina.wider_layers import widen, zero_channels
from esper.leyline.errors import first_line


def wider_groups(
    model: nn.Module, run: Callable[[], Any]
) -> tuple[list[ChannelGroup], dict[str, str]]:
    """``channel_groups`` with which the forward pass still works when they are twice as wide.

    It does not where a size is written into it, as in ``x.view(-1, 400)``.
    """
    groups, reasons = channel_groups(model, run)
    for group in list(groups):
        change = widen(model, group, zero_channels(model, group, group.channels))
        try:
            run()
        except Exception as error:
            reasons[group.name] = (
                "the forward pass takes no more channels, perhaps because their number is written "
                f"into it: {first_line(error)}"
            )
            groups.remove(group)
        finally:
            change.undo()
    return groups, reasons
