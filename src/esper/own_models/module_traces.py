"""What forward passes show of the modules of a network: where a seed would fit, and where not."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from esper.kasmina.nested import below, leaves
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
        position: that of its last call among those of all modules.
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
    position: int = 0
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
        weight = next(self.module.parameters(), None) is not None
        return weight and not self.module._modules.keys() - {"parametrizations"}


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
            each.calls, each.position = each.calls + 1, next(clock)
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
    layers = [t for t in traces.values() if t.calls and t.is_layer]
    for each in traces.values():
        each.batch_axis = _changed_axis(shapes[each.name], each.shape)
        if not each.calls:
            each.reason = "is not called in a forward pass"
        elif each.calls > 1:
            each.reason = f"is called {each.calls} times in a forward pass"
        elif hasattr(each.module, SEED):
            each.reason = f"already has an attribute called {SEED!r}"
        each.layers = [t for t in layers if below(t.name, each.name)]
        before = each.layers or [t for t in layers if t.position < each.position]
        each.behind = max(before, key=lambda t: t.position, default=None)
        after = (t for t in layers if t.position > each.position)
        each.ahead = min(after, key=lambda t: t.position, default=None)
    data_time_first = _data_time_first(traces)
    for each in traces.values():
        each.time_first = _time_first(each, data_time_first)
    return traces


def _changed_axis(half: tuple[int, ...] | None, full: tuple[int, ...] | None) -> int | None:
    """The first axis that grows with the number of samples; None if none does."""
    if half is None or full is None or len(half) != len(full):
        return None
    return next((i for i, (a, b) in enumerate(zip(half, full, strict=True)) if a != b), None)


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
    ancestors = [t for t in traces.values() if t.calls and below(each.name, t.name)]
    nearest = max(ancestors, key=lambda t: len(t.name), default=None)
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


def probe(traces: Iterable[ModuleTrace], run: Run) -> None:
    """Note on the traces of a model which modules cannot have a seed, and which make predictions.

    The model has neither hooks nor submodules more than before; no parameter gets a gradient.

    Args:
        traces: what a walk showed of the modules.
        run: runs a forward pass in evaluation mode.
    """
    of_module = {trace.module: trace for trace in traces if not trace.reason}
    gradientless, predicting = gradient_reach(list(of_module), run)
    for module in gradientless:
        of_module[module].reason = "gets no gradient from the outputs"
    for module in predicting:
        of_module[module].predicts = True
    # A Sequential carries no seed itself.
    parents = [
        module
        for module, trace in of_module.items()
        if not trace.reason and module._modules and not isinstance(module, nn.Sequential)
    ]
    # This pass comes last: what a module keeps of it, unlike of the other, holds no graph.
    for module, reason in seed_callers(parents, run).items():
        of_module[module].reason = reason


class _SeedProbe(nn.Module):
    """Stands where a seed would, and notes whether it is called."""

    was_called = False

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Its first input."""
        self.was_called = True
        return next(iter((*inputs, *keywords.values())), None)


def seed_callers(modules: Sequence[nn.Module], run: Run) -> dict[nn.Module, str]:
    """The modules whose forward pass would not leave a seed among their submodules alone.

    Args:
        modules: modules without a submodule called as a seed.
        run: runs a forward pass in evaluation mode.

    Returns:
        Why not, by module.
    """
    probes = {module: _SeedProbe() for module in modules}
    fails = False
    try:
        for module, each in probes.items():
            module.add_module(SEED, each)
        run(True)
    except Exception:
        fails = True
    finally:
        for module in modules:
            if SEED in module._modules:
                del module._modules[SEED]
    text = "calls all of its submodules, and would call the seed"
    reasons = {module: text for module, each in probes.items() if each.was_called}
    if not fails or not modules:
        return reasons
    if reasons:
        return reasons | seed_callers([m for m in modules if m not in reasons], run)
    if len(modules) == 1:
        return {modules[0]: "fails with one more submodule, such as a seed"}
    half = len(modules) // 2
    return seed_callers(modules[:half], run) | seed_callers(modules[half:], run)


@dataclass
class _GradientProbes:
    """Scalars of value 0 that hooks add to the outputs of modules.

    Attributes:
        scalars: by module, what was added to its output.
        outputs: by module, its output with the scalar added.
        makers: by the identity of an output, the module that returned it first.
        cut: identities of the scalars that were added where no graph is built.
    """

    scalars: dict[nn.Module, Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    makers: dict[int, nn.Module] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)

    def hook(self, module: nn.Module) -> Callable[[nn.Module, Any, Any], Any]:
        """The forward hook of a module."""
        inside = set(module.modules())

        def add(_: nn.Module, inputs: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, Tensor) or not first.is_floating_point():
                return None
            maker = self.makers.get(id(first))
            if maker in inside:
                # A module that returns the output of its last layer makes the same prediction.
                self.scalars[module], self.outputs[module] = self.scalars[maker], first
                return None
            scalar = torch.zeros((), dtype=first.dtype, device=first.device, requires_grad=True)
            total = first + scalar
            self.scalars[module], self.outputs[module] = scalar, total
            self.makers[id(total)] = module
            if not total.requires_grad:
                self.cut.add(id(scalar))
            return (total, *output[1:]) if isinstance(output, tuple) else total

        return add


def gradient_reach(modules: Sequence[nn.Module], run: Run) -> tuple[set[nn.Module], set[nn.Module]]:
    """Whose outputs get a gradient from those of the model, and whose are these outputs.

    Nothing is propagated back, which recurrent layers of cuDNN refuse in evaluation mode.

    Args:
        modules: modules that are called once.
        run: runs a forward pass in evaluation mode.

    Returns:
        - The modules whose output gets no gradient.
        - The modules whose output is one of the model's and is used by no other of these.

        Both are empty if it cannot be known: the model returns objects other than tensors, nothing
        that has a gradient, or fails with gradients.
    """
    probes = _GradientProbes()
    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_hook(probes.hook(module)))
        with torch.enable_grad():
            results = list(leaves(run(True)))
    except Exception:
        return set(), set()
    finally:
        for handle in handles:
            handle.remove()
    outputs = list({id(x): x for x in results if isinstance(x, Tensor)}.values())
    if len(outputs) < len({id(x) for x in results}) or not any(x.requires_grad for x in outputs):
        return set(), set()
    graphs = [_graph(x) for x in outputs]
    leaf_ids = {id(scalar) for scalars, _ in graphs for scalar in scalars}
    hiding = any(hides for _, hides in graphs)
    gradientless = {
        module
        for module, scalar in probes.scalars.items()
        # A function of the user's own, such as a checkpoint, computes without a graph and builds it
        # in the backward pass.
        if id(scalar) not in leaf_ids and not (hiding and id(scalar) in probes.cut)
    }
    predicting = set()
    for module, output in probes.outputs.items():
        other_graphs = [
            scalars for x, (scalars, _) in zip(outputs, graphs, strict=True) if x is not output
        ]
        feeds_others = any(
            probes.scalars[module] is scalar for scalars in other_graphs for scalar in scalars
        )
        if len(other_graphs) < len(outputs) and not feeds_others:
            predicting.add(module)
    return gradientless, predicting


def _graph(output: Tensor) -> tuple[list[Tensor], bool]:
    """The leaves from which ``output`` was computed, and whether a part of its graph is hidden."""
    pending, nodes = [output.grad_fn], set()
    leaves: list[Tensor] = []
    hidden = False
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        hidden |= isinstance(node, BackwardCFunction)
        if (leaf := getattr(node, "variable", None)) is not None and not node.next_functions:
            leaves.append(leaf)
        pending += [following for following, _ in node.next_functions]
    return leaves, hidden
