"""Passes that show where a seed would be called as a layer, or could never learn."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from esper.own_models.attachment import SEED
from esper.own_models.module_traces import ModuleTrace, Run

_CALLED = "calls all of its submodules, and would call the seed"
_FAILS = "fails with one more submodule, such as a seed"
_UNREACHED = "gets no gradient from the outputs"


def probe(traces: Iterable[ModuleTrace], run: Run) -> None:
    """Note on the traces of a model which modules cannot have a seed, and which make predictions.

    The model has neither hooks nor submodules more than before; no parameter gets a gradient.

    Args:
        traces: what a walk showed of the modules.
        run: runs a forward pass in evaluation mode.
    """
    of_module = {trace.module: trace for trace in traces if not trace.reason}
    unreached, predicting = gradient_reach(list(of_module), run)
    for module in unreached:
        of_module[module].reason = _UNREACHED
    for module in predicting:
        of_module[module].predicts = True
    parents = [m for m, trace in of_module.items() if not trace.reason and _is_container(m)]
    # This pass comes last: what a module keeps of it, unlike of the other, holds no graph.
    for module, reason in seed_callers(parents, run).items():
        of_module[module].reason = reason


def _is_container(module: nn.Module) -> bool:
    """Whether it has submodules and may carry a seed itself, which no Sequential does."""
    return len(module._modules) > 0 and not isinstance(module, nn.Sequential)


class _SeedProbe(nn.Module):
    """Stands where a seed would, and notes whether it is called."""

    called = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Its first input."""
        self.called = True
        return next(iter((*inputs, *named.values())), None)


def seed_callers(modules: Sequence[nn.Module], run: Run) -> dict[nn.Module, str]:
    """The modules whose forward pass would not leave a seed among their submodules alone.

    Args:
        modules: modules without a submodule called as a seed.
        run: runs a forward pass in evaluation mode.

    Returns:
        Why not, by module.
    """
    probes = {module: _SeedProbe() for module in modules}
    failed = False
    try:
        for module, each in probes.items():
            module.add_module(SEED, each)
        run(True)
    except Exception:
        failed = True
    finally:
        for module in modules:
            if SEED in module._modules:
                del module._modules[SEED]
    found = {module: _CALLED for module, each in probes.items() if each.called}
    if not failed or not modules:
        return found
    if found:
        return found | seed_callers([m for m in modules if m not in found], run)
    if len(modules) == 1:
        return {modules[0]: _FAILS}
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
            changed = first + scalar
            self.scalars[module], self.outputs[module] = scalar, changed
            self.makers[id(changed)] = module
            if not changed.requires_grad:
                self.cut.add(id(scalar))
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

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
            found = list(_leaves(run(True)))
    except Exception:
        return set(), set()
    finally:
        for handle in handles:
            handle.remove()
    outputs = list({id(x): x for x in found if isinstance(x, Tensor)}.values())
    if len(outputs) < len({id(x) for x in found}) or not any(x.requires_grad for x in outputs):
        return set(), set()
    graphs = [_graph(x) for x in outputs]
    reached = {id(scalar) for scalars, _ in graphs for scalar in scalars}
    hiding = any(hides for _, hides in graphs)
    unreached = {
        module
        for module, scalar in probes.scalars.items()
        # A function of the user's own, such as a checkpoint, computes without a graph and builds it
        # in the backward pass.
        if id(scalar) not in reached and not (hiding and id(scalar) in probes.cut)
    }
    predicting = set()
    for module, output in probes.outputs.items():
        others = [
            scalars for x, (scalars, _) in zip(outputs, graphs, strict=True) if x is not output
        ]
        used = any(probes.scalars[module] is scalar for scalars in others for scalar in scalars)
        if len(others) < len(outputs) and not used:
            predicting.add(module)
    return unreached, predicting


def _leaves(value: object) -> Iterator[object]:
    """Tensors in nested dicts, tuples, lists and dataclasses, and what may hold others."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _leaves(getattr(value, each.name))
    elif value is not None and not isinstance(value, bool | int | float | str):
        yield value


def _graph(output: Tensor) -> tuple[list[Tensor], bool]:
    """The leaves from which ``output`` was computed, and whether a part of its graph is hidden."""
    pending, visited = [output.grad_fn], set()
    leaves: list[Tensor] = []
    hidden = False
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        hidden |= isinstance(node, BackwardCFunction)
        if (leaf := getattr(node, "variable", None)) is not None and not node.next_functions:
            leaves.append(leaf)
        pending += [following for following, _ in node.next_functions]
    return leaves, hidden
