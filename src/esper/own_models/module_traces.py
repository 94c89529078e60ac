"""What forward passes show of the modules of a network: calls, order, shapes of activations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor, nn

from esper.own_models.attachment import SEED

Run = Callable[[bool], Any]
"""Runs a forward pass of the model in evaluation mode and returns its output: with half the samples
if true and possible."""


@dataclass(eq=False)
class ModuleTrace:
    """What forward passes show of a module: its calls, its output, the layers inside it.

    Attributes:
        name: name under which the model lists the module.
        module: the module.
        calls: number of its calls in a forward pass.
        place: position of its last call among those of all modules.
        shape: shape of its output, or of a tuple's first element; None if no seed can read it.
        axes: number of axes of its output; 0 if that is no tensor.
        reason: why there cannot be a seed behind it, or an empty string.
        batch_axis: first axis that grows with the number of samples; None if none does.
        time_first: whether its activation of three axes may be ``[T, B, C]``.
        layers: the called layers within it, or itself.
        behind: the last layer with weights within the module, or before it if it has none.
        ahead: the next layer with weights that is called after the module.
        predicts: whether its output is one of the model's and is used by no other of these.
    """

    name: str
    module: nn.Module
    calls: int = 0
    place: int = 0
    shape: tuple[int, ...] | None = None
    axes: int = 0
    reason: str = ""
    batch_axis: int | None = None
    time_first: bool = False
    layers: list["ModuleTrace"] = field(default_factory=list)
    behind: "ModuleTrace | None" = None
    ahead: "ModuleTrace | None" = None
    predicts: bool = False

    @property
    def is_layer(self) -> bool:
        """Whether it has weights of its own and no children but their parametrizations."""
        own = next(self.module.parameters(), None) is not None
        return own and not self.module._modules.keys() - {"parametrizations"}


def walk(model: nn.Module, run: Run) -> dict[str, ModuleTrace]:
    """What two forward passes show of every module below ``model``, by name."""
    traces = {
        name: ModuleTrace(name, module)
        for name, module in model.named_modules()
        if name and "parametrizations" not in name.split(".")
    }
    shapes: dict[str, tuple[int, ...] | None] = {}
    clock = count()

    def note(each: ModuleTrace) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            each.calls, each.place = each.calls + 1, next(clock)
            first = output[0] if isinstance(output, tuple) else output
            each.axes = first.dim() if isinstance(first, Tensor) else 0
            each.shape, each.reason = _shape(first)

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
    called = [t for t in traces.values() if t.calls and t.is_layer]
    for each in traces.values():
        each.batch_axis = _changed_axis(shapes[each.name], each.shape)
        if not each.calls:
            each.reason = "is not called in a forward pass"
        elif each.calls > 1:
            each.reason = f"is called {each.calls} times in a forward pass"
        elif hasattr(each.module, SEED):
            each.reason = f"already has an attribute called {SEED!r}"
        each.layers = [t for t in called if below(t.name, each.name)]
        before = each.layers or [t for t in called if t.place < each.place]
        each.behind = max(before, key=lambda t: t.place, default=None)
        after = (t for t in called if t.place > each.place)
        each.ahead = min(after, key=lambda t: t.place, default=None)
    data_time_first = _data_time_first(traces)
    for each in traces.values():
        each.time_first = _time_first(each, data_time_first)
    return traces


def below(name: str, ancestor: str) -> bool:
    """Whether a module lies within another, or is the same; by their names."""
    return name == ancestor or name.startswith(f"{ancestor}.")


def _changed_axis(half: tuple[int, ...] | None, whole: tuple[int, ...] | None) -> int | None:
    """The first axis that grows with the number of samples; None if none does."""
    if half is None or whole is None or len(half) != len(whole):
        return None
    return next((i for i, (a, b) in enumerate(zip(half, whole, strict=True)) if a != b), None)


def _shape(output: object) -> tuple[tuple[int, ...] | None, str]:
    """The shape of an output that a seed can read; else None and the reason."""
    if not isinstance(output, Tensor):
        return None, f"returns a {type(output).__name__}"
    if output.is_nested:
        return None, "returns a nested tensor"
    if not output.is_floating_point():
        return None, f"returns {output.dtype} numbers"
    if output.ndim not in (2, 3, 4):
        return None, f"returns an activation of {output.ndim} axes"
    return tuple(output.shape), ""


def _data_time_first(traces: dict[str, ModuleTrace]) -> bool:
    """Whether the batches themselves are ``[T, B, ...]``, so that half of one has half the steps.

    A recurrent or attention layer whose first axis is time says so if that axis was halved.
    """
    for each in traces.values():
        if getattr(each.module, "batch_first", True) is not False:
            continue
        layer = each if each.calls else _skipping(each, traces)
        if layer is not None and layer.axes == 3 and layer.batch_axis == 0:
            return True
    return False


def _skipping(each: ModuleTrace, traces: dict[str, ModuleTrace]) -> ModuleTrace | None:
    """The nearest called ancestor, if it computes by a fast path without calling what it holds."""
    called = [t for t in traces.values() if t.calls and below(each.name, t.name)]
    nearest = max(called, key=lambda t: len(t.name), default=None)
    if nearest is None:
        return None
    inside = (t for t in traces.values() if t is not nearest and below(t.name, nearest.name))
    return None if any(t.calls for t in inside) else nearest


def _time_first(each: ModuleTrace, data_time_first: bool) -> bool:
    """Whether an activation of three axes may be ``[T, B, C]``, of which one axis was halved."""
    if data_time_first and each.batch_axis is not None:
        return each.batch_axis != 1
    if each.batch_axis is not None:
        return each.batch_axis != 0
    return any(getattr(module, "batch_first", True) is False for module in each.module.modules())
