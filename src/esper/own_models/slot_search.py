"""Finding the places of a module behind which seeds may grow.

A few forward passes show which modules are called once and return an activation that a seed can
read, leave a seed among their submodules alone, and get a gradient.
Of these, repeated blocks (of a ResNet or a transformer) are preferred to stages, and stages to
single layers.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod

from torch import nn

from esper.kasmina.blueprints import of_family
from esper.kasmina.nested import below
from esper.kasmina.slots import Slot, SlotSpec
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError, suggestion
from esper.own_models.module_traces import ModuleTrace, Run, probe, walk

MAX_SLOTS = 8
"""Largest number of slots that are found without being named."""
POINTWISE = ("mlp_small", "mlp", "lora", "lora_large", "norm")
"""Blueprints for sequences that look at one position alone."""

_GROUP_STARTS = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding, nn.RNNBase)
_GROUP_ENDS = (
    nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.ReLU, nn.GELU, nn.SiLU,
    nn.LeakyReLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Mish, nn.PReLU,
)  # fmt: skip
"""Norms and activation functions: the end of a group of layers."""


def find_slots(
    model: nn.Module, run: Run, names: Sequence[str] | None = None
) -> tuple[SlotSpec, ...]:
    """The slots of ``model``, in the order of its forward pass.

    Args:
        model: a module without seeds. Where it contains ``esper.kasmina.Slot``, these are its
            slots.
        run: runs a forward pass of at least one sample.
        names: names of modules behind which a seed may grow; found by a walk if None.

    Returns:
        At least one slot. Its name is that of the module behind which the seed hangs; for an
        ``nn.Sequential`` this is its last layer.

    Raises:
        UsageError: a named module cannot have a seed, or no place was found.
    """
    if isinstance(names, str):
        raise UsageError(f"slots: got the string {names!r}; give a list of names")
    if names is not None and not names:
        raise UsageError("slots: the list is empty; omit slots to find them automatically")
    traces = walk(model, run)
    probe(traces.values(), run)
    if names is not None:
        carriers = [_carrier_of(model, traces, name) for name in names]
        double = Counter(t.name for t in carriers).most_common(1)[0]
        if double[1] > 1:
            raise UsageError(f"slots: {double[0]!r} is named twice; name it once")
    else:
        markers = [t for t in traces.values() if isinstance(t.module, Slot)]
        carriers = [_carrier_of(model, traces, t.name) for t in markers] or _search(model, traces)
    carriers.sort(key=lambda t: t.position)
    return tuple(_spec(t, (i + 1) / len(carriers)) for i, t in enumerate(carriers))


def _carrier(module: nn.Module, traces: dict[str, ModuleTrace]) -> ModuleTrace:
    """The module that carries a seed behind ``module``: of a Sequential, its last layer.

    A Sequential would call the seed itself, as one more layer.
    """
    while type(module).forward is nn.Sequential.forward and len(module._modules):
        child = list(module._modules.values())[-1]
        assert child is not None
        module = child
    # A module that has several names is listed under the first alone.
    return next(trace for trace in traces.values() if trace.module is module)


def _problem(carrier: ModuleTrace) -> str:
    """Why there cannot be a seed behind a module that would carry it, or an empty string."""
    if isinstance(carrier.module, nn.Sequential):
        return "is a Sequential with a forward pass of its own"
    return carrier.reason or objection(carrier)


def _carrier_of(model: nn.Module, traces: dict[str, ModuleTrace], name: str) -> ModuleTrace:
    modules = dict(model.named_modules(remove_duplicate=False))
    if not name or name not in modules:
        hint = suggestion(name, traces, "`print(model)` shows the names")
        raise UsageError(f"slots: {type(model).__name__} has no module {name!r}; {hint}")
    carrier = _carrier(modules[name], traces)
    if problem := _problem(carrier):
        raise UsageError(f"slots: {carrier.name!r} {problem}; name another module")
    marker = carrier.module
    if isinstance(marker, Slot) and marker.channels != (count := channels(carrier)):
        raise UsageError(
            f"slots: {carrier.name!r} is esper.Slot({marker.channels}), but its activation has "
            f"{count} channels; write esper.Slot({count})"
        )
    return carrier


def _search(model: nn.Module, traces: dict[str, ModuleTrace]) -> list[ModuleTrace]:
    """The slots of a module without names or markers: the coarsest kind that has two places."""
    # The last layer makes a prediction, as others may: a seed behind it would read the prediction.
    last = max((t.position for t in traces.values() if t.calls and t.is_layer), default=0)
    best: list[ModuleTrace] = []
    for modules in (_repeated_blocks(traces), _stages(traces), _layers(traces)):
        carriers = {t.name: t for t in (_carrier(each.module, traces) for each in modules)}
        before = (t for t in carriers.values() if t.position < last and not t.predicts)
        usable = sorted((t for t in before if not _problem(t)), key=lambda t: t.position)
        best = max(best, usable, key=lambda slots: min(len(slots), 2))
    if not best:
        raise UsageError(
            f"slots: found no place for a seed in {type(model).__name__}: no module that is called "
            "once returns [B, C, H, W], [B, T, C] or [B, F] before the last layer; name one"
        )
    return _select_evenly(best)


def _select_evenly(usable: list[ModuleTrace]) -> list[ModuleTrace]:
    """At most ``MAX_SLOTS`` of the places, at equal distances, always with the last."""
    count = min(len(usable), MAX_SLOTS)
    return [usable[round((i + 1) * len(usable) / count) - 1] for i in range(count)]


def _repeated_blocks(traces: dict[str, ModuleTrace]) -> list[ModuleTrace]:
    """The outermost blocks of a class that occurs more than once."""
    blocks = [t for t in traces.values() if _is_block(t)]
    blocks = [t for t in blocks if not isinstance(t.module, nn.Sequential)]
    counts = Counter(type(t.module) for t in blocks)
    return _outermost([t for t in blocks if counts[type(t.module)] > 1])


def _stages(traces: dict[str, ModuleTrace]) -> list[ModuleTrace]:
    """The outermost blocks; while there is only one, those inside it."""
    blocks = [t for t in traces.values() if _is_block(t)]
    outermost = _outermost(blocks)
    while len(outermost) == 1 and len(blocks) > 1:
        blocks = [t for t in blocks if t not in outermost]
        outermost = _outermost(blocks)
    return outermost


def _outermost(blocks: list[ModuleTrace]) -> list[ModuleTrace]:
    """The blocks that lie in none of the others."""
    return [t for t in blocks if not any(below(t.name, o.name) for o in blocks if o is not t)]


def _is_block(each: ModuleTrace) -> bool:
    return not each.reason and len(each.layers) > 1


def _layers(traces: dict[str, ModuleTrace]) -> list[ModuleTrace]:
    """The last norm or activation function behind each layer, else the layer itself."""
    usable = [t for t in traces.values() if not t.reason]
    groups: list[ModuleTrace] = []
    for each in sorted(usable, key=lambda t: t.position):
        if isinstance(each.module, _GROUP_STARTS):
            groups.append(each)
        elif isinstance(each.module, _GROUP_ENDS) and groups:
            groups[-1] = each
    return groups


def _spec(each: ModuleTrace, depth: float) -> SlotSpec:
    assert each.shape is not None
    family, shape = layout(each), each.shape
    accepts = tuple(BLUEPRINTS[kind] for kind in of_family(family))
    if family == "sequence" and each.time_first:
        accepts = tuple(name for name in accepts if name in POINTWISE)
    size = (shape[2], shape[3]) if family == "conv" else (1, shape[1] if len(shape) == 3 else 1)
    return SlotSpec(each.name, channels(each), size, depth, family, accepts)


_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
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


def objection(each: ModuleTrace) -> str:
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
        marker_axis = _matching_axis(each.shape, each.module.channels)
        if marker_axis is not None:
            return marker_axis
    if writer is not None:
        usual = 1 if isinstance(writer.module, _CHANNELS_FIRST) else -1
        axis = _matching_axis(each.shape, _features(writer.module, _OUTPUTS))
        # A permuted activation has as many numbers as before. Where layers are concatenated, the
        # width of the image may be the number of features of the last of them by chance.
        if axis == usual or (axis and prod(each.shape) == prod(writer.shape or ())):
            return axis
        # An activation function rarely works on other axes than the layer before it.
        plain = not each.layers and each.shape == writer.shape
        if (writer is each or (plain and not isinstance(each.module, Slot))) and (
            layer_axis := _known_axis(writer.module)
        ) is not None:
            return layer_axis
    if reader is not None and reader.axes == len(each.shape):
        kind = _known_axis(reader.module)
        axis = _matching_axis(each.shape, _features(reader.module, _INPUTS))
        if kind is not None:
            return kind if axis is None else axis
    if writer is None:
        return 1 if len(each.shape) == 4 else -1
    return usual


def _matching_axis(shape: tuple[int, ...], features: int | None) -> int | None:
    """The one of the axes 1 and -1 that has the given length; None if it is neither or both."""
    axes = [axis for axis in (1, -1) if shape[axis] == features]
    return axes[0] if len(axes) == 1 else None


def _features(module: nn.Module, attributes: tuple[str, ...]) -> int | None:
    """The number of features of a layer, under one of the given attributes; None if unknown."""
    if isinstance(module, nn.RNNBase):
        width = module.proj_size or module.hidden_size
        return 2 * width if module.bidirectional else width
    for name in attributes:
        if isinstance(size := getattr(module, name, None), int):
            return size
    shape = getattr(module, "normalized_shape", None)
    return shape[-1] if isinstance(shape, tuple | list) and shape else None


def _known_axis(module: nn.Module) -> int | None:
    """The axis of channels of a layer of torch, 1 or -1; None if it is another layer."""
    if isinstance(module, _CHANNELS_FIRST):
        return 1
    # Channels-first subclasses of LayerNorm permute in a forward pass of their own.
    plain = type(module).forward is nn.LayerNorm.forward
    return -1 if plain or isinstance(module, _CHANNELS_LAST) else None
