"""What forward passes show of the modules of a network: calls, order, shapes of activations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor, nn

from esper.kasmina.grafts.attachment import SEED

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
        reason: why there cannot be a seed behind it, or an empty string.
        batch_axis: first axis that grows with the number of samples; None if none does.
        time_first: whether its activation of three axes may be ``[T, B, C]``.
        layers: the called layers within it, or itself.
        behind: the last layer with weights within the module, or before it if it has none.
    """

    name: str
    module: nn.Module
    calls: int = 0
    place: int = 0
    shape: tuple[int, ...] | None = None
    reason: str = ""
    batch_axis: int | None = None
    time_first: bool = False
    layers: list["ModuleTrace"] = field(default_factory=list)
    behind: "ModuleTrace | None" = None

    @property
    def is_layer(self) -> bool:
        """Whether it has weights of its own and no children."""
        own = next(self.module.parameters(), None) is not None
        return own and not len(self.module._modules)


def walk(model: nn.Module, run: Run) -> dict[str, ModuleTrace]:
    """What two forward passes show of every module below ``model``, by name."""
    traces = {name: ModuleTrace(name, module) for name, module in model.named_modules() if name}
    shapes: dict[str, tuple[int, ...] | None] = {}
    clock = count()

    def note(each: ModuleTrace) -> Callable[[nn.Module, Any, Any], None]:
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
    for each in traces.values():
        each.time_first = _time_first(each)
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


def _time_first(each: ModuleTrace) -> bool:
    if each.batch_axis is not None:
        return each.batch_axis != 0
    return any(getattr(module, "batch_first", True) is False for module in each.module.modules())
