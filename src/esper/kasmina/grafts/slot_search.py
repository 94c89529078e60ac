"""Finding the places of a module behind which seeds may grow.

One forward pass shows which modules are called once and return an activation that a seed can read.
Of these, repeated blocks (of a ResNet or a transformer) are preferred to stages, and stages to
single layers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor, nn

from esper.kasmina.grafts.attachment import SEED
from esper.kasmina.grafts.seed_modules import BRANCHES
from esper.kasmina.hosts.module import Slot
from esper.kasmina.slots import SlotSpec
from esper.leyline.errors import UsageError, suggestion

MAX_SLOTS = 8
"""Largest number of slots that are found without being named."""
POINTWISE = ("mlp_small", "mlp", "lora", "lora_large", "norm")
"""Blueprints for sequences that look at one position alone."""

_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
)
"""Layers whose output has its channels on axis 1."""
_GROUP_STARTS = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding, nn.RNNBase)
_GROUP_ENDS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardswish,
    nn.Mish,
    nn.PReLU,
)
"""Norms and activation functions: the end of a group of layers."""


@dataclass
class _ModuleTrace:
    """What forward passes show of a module: its calls, its output, the layers inside it."""

    name: str
    module: nn.Module
    calls: int = 0
    place: int = 0
    shape: tuple[int, ...] | None = None
    reason: str = "is not called in a forward pass"
    batch_axis: int | None = None
    layers: list["_ModuleTrace"] = field(default_factory=list)
    behind: nn.Module | None = None
    """The last layer with weights within the module, or before it if it has none."""

    @property
    def is_layer(self) -> bool:
        """Whether it has weights of its own and no children."""
        own = next(self.module.parameters(), None) is not None
        return own and not len(self.module._modules)


Run = Callable[[bool], Any]
"""Runs a forward pass of the model in evaluation mode: with half the samples if true and
possible."""


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
    traces = _walk(model, run)
    if names is not None:
        if not names:
            raise UsageError("slots: the list is empty; omit slots to find them automatically")
        chosen = [_named(model, traces, name) for name in names]
        double = Counter(s.name for s in chosen).most_common(1)[0]
        if double[1] > 1:
            raise UsageError(f"slots: {double[0]!r} is named twice; name it once")
    else:
        markers = [s for s in traces.values() if isinstance(s.module, Slot)]
        chosen = [_named(model, traces, s.name) for s in markers] or _found(model, traces)
    chosen.sort(key=lambda s: s.place)
    return tuple(_spec(s, (i + 1) / len(chosen)) for i, s in enumerate(chosen))


def _walk(model: nn.Module, run: Run) -> dict[str, _ModuleTrace]:
    """What two forward passes show of every module below ``model``, by name."""
    traces = {name: _ModuleTrace(name, module) for name, module in model.named_modules() if name}
    shapes: dict[str, tuple[int, ...] | None] = {}
    clock = count()

    def note(each: _ModuleTrace) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            each.calls, each.place = each.calls + 1, next(clock)
            each.shape, each.reason = _shape(output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [each.module.register_forward_hook(note(each)) for each in traces.values()]
    try:
        run(True)
        for each in traces.values():
            shapes[each.name], each.calls = each.shape, 0
        run(False)
    finally:
        for handle in handles:
            handle.remove()
    called = [s for s in traces.values() if s.calls and s.is_layer]
    for each in traces.values():
        if each.calls > 1:
            each.shape, each.reason = None, f"is called {each.calls} times in a forward pass"
        elif hasattr(each.module, SEED):
            each.shape, each.reason = None, f"already has an attribute called {SEED!r}"
        each.batch_axis = _changed_axis(shapes[each.name], each.shape)
        each.layers = [s for s in called if _below(s.name, each.name)]
        before = each.layers or [s for s in called if s.place < each.place]
        each.behind = max(before, key=lambda s: s.place).module if before else None
    return traces


def _changed_axis(half: tuple[int, ...] | None, whole: tuple[int, ...] | None) -> int | None:
    """The first axis that grows with the number of samples; None if none does."""
    if half is None or whole is None or len(half) != len(whole):
        return None
    return next((i for i, (a, b) in enumerate(zip(half, whole, strict=True)) if a != b), None)


def _shape(output: object) -> tuple[tuple[int, ...] | None, str]:
    """The shape of an output that a seed can read; else None and the reason."""
    if not isinstance(output, Tensor):
        return None, f"returns a {type(output).__name__}"
    if output.is_nested or not output.is_floating_point():
        return None, f"returns {output.dtype} numbers"
    if output.ndim not in (2, 3, 4):
        return None, f"returns an activation of {output.ndim} axes"
    return tuple(output.shape), ""


def _below(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(f"{ancestor}.")


def _carrier(module: nn.Module, name: str) -> str:
    """The module that carries a seed behind ``module``: of a Sequential, its last layer.

    A Sequential would call the seed itself, as one more layer.
    """
    while type(module).forward is nn.Sequential.forward and len(module._modules):
        last, child = list(module._modules.items())[-1]
        assert child is not None
        module, name = child, f"{name}.{last}"
    return name


def _carried(each: _ModuleTrace, traces: dict[str, _ModuleTrace]) -> _ModuleTrace | None:
    """The carrier of a seed behind a module, or None if there cannot be one."""
    carrier = traces.get(_carrier(each.module, each.name))
    if carrier is None or carrier.shape is None or isinstance(carrier.module, nn.Sequential):
        return None
    return None if _unsupported(carrier) else carrier


def _named(model: nn.Module, traces: dict[str, _ModuleTrace], name: str) -> _ModuleTrace:
    if name not in traces:
        hint = suggestion(name, traces, "`print(model)` shows the names")
        raise UsageError(f"slots: {type(model).__name__} has no module {name!r}; {hint}")
    carrier = traces[_carrier(traces[name].module, name)]
    problem = carrier.reason if carrier.shape is None else _unsupported(carrier)
    if isinstance(carrier.module, nn.Sequential):
        problem = "is a Sequential with a forward pass of its own"
    if problem:
        raise UsageError(f"slots: {carrier.name!r} {problem}; name another module")
    return carrier


def _unsupported(each: _ModuleTrace) -> str:
    """Why no seed reads the activation of a module, or an empty string."""
    assert each.shape is not None
    if len(each.shape) == 3 and isinstance(each.behind, _CHANNELS_FIRST):
        return "returns [B, C, L], for which there are no seeds yet (use Conv2d of height 1)"
    return "returns a single channel" if _channels(each) < 2 else ""


def _layout(each: _ModuleTrace) -> str:
    """The layout of a module's activation, one of ``seed_modules.LAYOUTS``."""
    assert each.shape is not None
    if len(each.shape) == 3:
        return "sequence"
    first = each.behind is None or isinstance(each.behind, _CHANNELS_FIRST)
    return "conv" if len(each.shape) == 4 and first else "mlp"


def _channels(each: _ModuleTrace) -> int:
    assert each.shape is not None
    return each.shape[1] if _layout(each) == "conv" else each.shape[-1]


def _found(model: nn.Module, traces: dict[str, _ModuleTrace]) -> list[_ModuleTrace]:
    """The slots of a module without names or markers: the coarsest kind that has two places."""
    # The last layer makes the prediction: a seed behind it would read the prediction.
    last = max((s.place for s in traces.values() if s.calls and s.is_layer), default=0)
    best: list[_ModuleTrace] = []
    for places in (_repeated(traces), _stages(traces), _layers(traces)):
        carriers = {s.name: s for each in places if (s := _carried(each, traces)) is not None}
        usable = sorted((s for s in carriers.values() if s.place < last), key=lambda s: s.place)
        best = max(best, usable, key=lambda found: min(len(found), 2))
    if not best:
        raise UsageError(
            f"slots: found no place for a seed in {type(model).__name__}: no module that is called "
            "once returns [B, C, H, W], [B, T, C] or [B, F] before the last layer; name one"
        )
    return _spread(best)


def _spread(usable: list[_ModuleTrace]) -> list[_ModuleTrace]:
    """At most ``MAX_SLOTS`` of the places, at equal distances, always with the last."""
    kept = min(len(usable), MAX_SLOTS)
    return [usable[round((i + 1) * len(usable) / kept) - 1] for i in range(kept)]


def _repeated(traces: dict[str, _ModuleTrace]) -> list[_ModuleTrace]:
    """The outermost blocks of a class that occurs more than once."""
    blocks = [s for s in traces.values() if _is_block(s)]
    blocks = [s for s in blocks if not isinstance(s.module, nn.Sequential)]
    counts = Counter(type(s.module) for s in blocks)
    return _outermost([s for s in blocks if counts[type(s.module)] > 1])


def _stages(traces: dict[str, _ModuleTrace]) -> list[_ModuleTrace]:
    """The outermost blocks; while there is only one, those inside it."""
    blocks = [s for s in traces.values() if _is_block(s)]
    outermost = _outermost(blocks)
    while len(outermost) == 1 and len(blocks) > 1:
        blocks = [s for s in blocks if s not in outermost]
        outermost = _outermost(blocks)
    return outermost


def _outermost(blocks: list[_ModuleTrace]) -> list[_ModuleTrace]:
    """The blocks that lie in none of the others."""
    return [s for s in blocks if not any(_below(s.name, o.name) for o in blocks if o is not s)]


def _is_block(each: _ModuleTrace) -> bool:
    return each.calls == 1 and each.shape is not None and len(each.layers) > 1


def _layers(traces: dict[str, _ModuleTrace]) -> list[_ModuleTrace]:
    """The last norm or activation function behind each layer, else the layer itself."""
    found = [s for s in traces.values() if s.calls == 1 and s.shape]
    groups: list[_ModuleTrace] = []
    for each in sorted(found, key=lambda s: s.place):
        if isinstance(each.module, _GROUP_STARTS):
            groups.append(each)
        elif isinstance(each.module, _GROUP_ENDS) and groups:
            groups[-1] = each
    return groups


def _spec(each: _ModuleTrace, depth: float) -> SlotSpec:
    assert each.shape is not None
    layout, shape = _layout(each), each.shape
    accepts = tuple(BRANCHES[layout])
    if layout == "sequence" and _time_first(each):
        accepts = tuple(name for name in accepts if name in POINTWISE)
    size = (shape[2], shape[3]) if layout == "conv" else (1, shape[1] if len(shape) == 3 else 1)
    return SlotSpec(each.name, _channels(each), size, depth, layout, accepts)


def _time_first(each: _ModuleTrace) -> bool:
    """Whether the activation may be ``[T, B, C]``, in which attention would mix samples."""
    if each.batch_axis is not None:
        return each.batch_axis != 0
    return any(getattr(module, "batch_first", True) is False for module in each.module.modules())
