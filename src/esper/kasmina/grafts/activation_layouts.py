"""Which axis of an activation holds its channels, from the layers that write and read it."""

from math import prod

from torch import nn

from esper.kasmina.grafts.module_traces import ModuleTrace
from esper.kasmina.hosts.module import Slot

_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
)
"""Layers whose input and output have their channels on axis 1."""
_CHANNELS_LAST = (nn.Linear, nn.Embedding, nn.RNNBase)
_OUTPUTS = ("out_channels", "num_features", "num_channels", "out_features", "embedding_dim")
_INPUTS = ("in_channels", "num_features", "num_channels", "in_features")
"""Attributes in which layers keep the number of their features."""


def layout(each: ModuleTrace) -> str:
    """The layout of a module's activation, see ``seed_module.Seed``."""
    assert each.shape is not None
    if len(each.shape) == 3:
        return "sequence"
    return "conv" if len(each.shape) == 4 and _channel_axis(each) == 1 else "mlp"


def channels(each: ModuleTrace) -> int:
    """Number of channels of a module's activation."""
    assert each.shape is not None
    return each.shape[1] if layout(each) == "conv" else each.shape[-1]


def unsupported(each: ModuleTrace) -> str:
    """Why no seed reads the activation of a module, or an empty string."""
    assert each.shape is not None
    if len(each.shape) == 3 and _channel_axis(each) == 1:
        return "returns [B, C, L], for which there are no seeds yet (use Conv2d of height 1)"
    return "returns a single channel" if channels(each) < 2 else ""


def _channel_axis(each: ModuleTrace) -> int:
    """The axis that holds the channels of an activation of three or four axes: 1 or -1."""
    assert each.shape is not None
    if each.batch_axis == 1:
        return -1
    writer, reader = each.behind, each.ahead
    if isinstance(each.module, Slot) and len(each.shape) == 4:
        marked = _matching_axis(each.shape, each.module.channels)
        if marked is not None:
            return marked
    if writer is not None:
        usual = 1 if isinstance(writer.module, _CHANNELS_FIRST) else -1
        found = _matching_axis(each.shape, _features(writer.module, _OUTPUTS))
        # A permuted activation has as many numbers as before. Where layers are concatenated, the
        # width of the image may be the number of features of the last of them by chance.
        if found == usual or (found and prod(each.shape) == prod(writer.shape or ())):
            return found
        # An activation function rarely works on other axes than the layer before it.
        plain = not each.layers and each.shape == writer.shape
        if (writer is each or (plain and not isinstance(each.module, Slot))) and (
            own := _known_axis(writer.module)
        ) is not None:
            return own
    if reader is not None and reader.axes == len(each.shape):
        kind = _known_axis(reader.module)
        found = _matching_axis(each.shape, _features(reader.module, _INPUTS))
        if kind is not None:
            return kind if found is None else found
    if writer is None:
        return 1 if len(each.shape) == 4 else -1
    return usual


def _matching_axis(shape: tuple[int, ...], features: int | None) -> int | None:
    """The one of the axes 1 and -1 that has the given length; None if it is neither or both."""
    found = [axis for axis in (1, -1) if shape[axis] == features]
    return found[0] if len(found) == 1 else None


def _features(module: nn.Module, attributes: tuple[str, ...]) -> int | None:
    """The number of features of a layer, under one of the given attributes; None if unknown."""
    if isinstance(module, nn.RNNBase):
        width = module.proj_size or module.hidden_size
        return 2 * width if module.bidirectional else width
    for name in attributes:
        if isinstance(found := getattr(module, name, None), int):
            return found
    normalized = getattr(module, "normalized_shape", None)
    return normalized[-1] if isinstance(normalized, tuple | list) and normalized else None


def _known_axis(module: nn.Module) -> int | None:
    """The axis of channels of a layer of torch, 1 or -1; None if it is another layer."""
    if isinstance(module, _CHANNELS_FIRST):
        return 1
    # Channels-first subclasses of LayerNorm permute in a forward pass of their own.
    plain = type(module).forward is nn.LayerNorm.forward
    return -1 if plain or isinstance(module, _CHANNELS_LAST) else None
