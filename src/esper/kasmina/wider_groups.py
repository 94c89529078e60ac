"""Which groups of channels a module lets become wider, tried in its forward pass."""

from collections.abc import Callable
from typing import Any

from torch import nn

from esper.kasmina.channel_groups import ChannelGroup, channel_groups
from esper.kasmina.wider_layers import NewChannels, gates_of, tensors_of, widen
from esper.leyline.errors import first_line


def wider_groups(
    model: nn.Module, run: Callable[[], Any]
) -> tuple[list[ChannelGroup], dict[str, str]]:
    """``channel_groups`` with which the forward pass still works when they are twice as wide.

    It does not where a size is written into it, as in ``x.view(-1, 400)``.
    """
    groups, reasons = channel_groups(model, run)
    for group in list(groups):
        change = widen(model, group, _zero_channels(model, group))
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


def _zero_channels(model: nn.Module, group: ChannelGroup) -> NewChannels:
    """As many channels as there are, of zeros."""
    entries, count = {}, group.channels
    for name in (*group.writers, *group.companions):
        module = model.get_submodule(name)
        gates = (gates_of(module),) if isinstance(module, nn.RNNBase) else ()
        for key, x in tensors_of(module):
            entries[f"{name}.{key}"] = x.new_zeros((count, *gates, *x.shape[1:]))
    return NewChannels(entries, count)
