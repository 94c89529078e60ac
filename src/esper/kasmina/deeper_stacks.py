"""Deepening of a stack of blocks, in place: a block gets a copy that adds nothing at first.

The copy is an ordinary block of the same class whose last layers are zero, so that it passes on
what it is given, as residual blocks and pre-norm transformers do (Net2DeeperNet, Chen and others,
"Net2Net", 2016; G_stack, Du and others, "Stacking Your Transformers", 2024).
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from esper.kasmina.layer_kinds import factors_of, tensors_of, weight_name
from esper.kasmina.nested import entries_of, map_leaves, tensors

MOST_LAYERS = 3
"""Most layers of a block that are made zero together."""
EXACT = 1e-6
"""Largest difference from its input, relative to its size, that a new block may make."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A block that can be copied.

    Attributes:
        container: name of the ``nn.Sequential`` or ``nn.ModuleList``.
        index: its place there.
        zeros: names of the layers in it that are zero in the copy.
    """

    container: str
    index: int
    zeros: tuple[str, ...]


@dataclass
class Deepening:
    """A copy that was inserted, and can be taken out.

    Attributes:
        model: the module.
        container: name of the stack.
        index: its place there.
        optimizers: those that were told.
    """

    model: nn.Module
    container: str
    index: int
    optimizers: tuple[Optimizer, ...] = ()
    _parameters: list[nn.Parameter] = field(default_factory=list)

    def undo(self) -> None:
        """Take it out again, of the optimizer as well."""
        with numbering(self.model, self.container) as stack:
            del stack[self.index]
        new = {id(p) for p in self._parameters}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in new]
            for p in self._parameters:
                optimizer.state.pop(p, None)


def repeats(model: nn.Module, run: Callable[[], Any]) -> tuple[list[Repeat], dict[str, str]]:
    """The blocks of a module that can be copied, and by the name of a stack why one cannot.

    Args:
        model: the module, in evaluation mode.
        run: computes its forward pass on a few samples, without gradients.
    """
    calls: dict[str, list[Any]] = {}
    blocks = dict(_blocks(model))
    hooks = []
    for name, block in blocks.items():

        def note(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls.setdefault(name, []).append(_copies(args, kwargs))

        def note_output(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            calls[name][-1].append(output)

        hooks.append(block.register_forward_pre_hook(note, with_kwargs=True))
        hooks.append(block.register_forward_hook(note_output))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    copyable, reasons = [], {}
    for name, block in blocks.items():
        container, _, index = name.rpartition(".")
        zeros = _zeros(block, calls.get(name, []))
        if isinstance(zeros, str):
            reasons[container] = zeros
        else:
            copyable.append(Repeat(container, int(index), zeros))
    return copyable, reasons


def deepen(
    model: nn.Module, container: str, index: int, zeros: tuple[str, ...], *optimizers: Optimizer
) -> Deepening:
    """Insert a copy of a block behind it.

    Args:
        model: the module.
        container: name of the stack.
        index: place of the block.
        zeros: see ``Repeat``.
        optimizers: train the module; their groups get new parameters behind those that they copy.
    """
    stack: Any = model.get_submodule(container)
    new = copy.deepcopy(stack[index])
    for name in zeros:
        for parameter in factors_of(new.get_submodule(name)):
            nn.init.zeros_(parameter)
    pairs = dict(zip(map(id, stack[index].parameters()), new.parameters(), strict=True))
    with numbering(model, container):
        stack.insert(index + 1, new)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        # In the order of an optimizer that is built from the deeper module.
        parameters = group["params"]
        sources = [i for i, p in enumerate(parameters) if id(p) in pairs]
        end = max(sources, default=-1) + 1
        parameters[end:end] = [pairs[id(parameters[i])] for i in sources]
    return Deepening(model, container, index + 1, optimizers, list(new.parameters()))


@contextmanager
def numbering(model: nn.Module, name: str) -> Iterator[Any]:
    """A stack whose blocks may come and go; what counts or numbers them is right again afterwards.

    Blocks may hold their number, such as ``layer_idx``, by which attention finds what it cached,
    and a module around the stack, or its ``config``, the depth, or an entry for each block.

    Args:
        model: the module.
        name: that of the stack.
    """
    stack: Any = model.get_submodule(name)
    before = list(stack)
    firsts = defaultdict[tuple[str, str], list[int]](list)
    for index, _, path, key, value in _integers(stack):
        firsts[path, key].append(value - index)
    yield stack
    for index, module, path, key, _ in list(_integers(stack)):
        first, *more = firsts[path, key] or [0]
        if {*more} == {first}:
            setattr(module, key, first + index)
    sources: list[int] = []
    for block in stack:  # a new one is as that before it
        sources.append(before.index(block) if block in before else sources[-1])
    around = [model.get_submodule(name[: dot.start()]) for dot in re.finditer(r"\.|^", name)]
    holders = (x for each in around for x in (each, getattr(each, "config", None)))
    for holder in {id(x): x for x in holders}.values():
        for key, value in list((entries := entries_of(holder)).items()):
            coder = re.search("encoder|decoder", key)
            if coder and coder[0] not in name:
                continue
            is_count = type(value) is int and value == len(before)
            if is_count and re.search("(layer|depth|block)s?$", key):
                entries[key] = len(stack)
            elif isinstance(value, list) and len(value) == len(before) and "layer" in key:
                entries[key] = [value[source] for source in sources]


def _integers(stack: Any) -> Iterator[tuple[int, nn.Module, str, str, int]]:
    """Attributes with the name of a number of a block: its index, the module in it with its path,
    and the attribute's name and value."""
    for index, block in enumerate(stack):
        for path, module in block.named_modules() if block is not None else ():
            for key, value in vars(module).items():
                if type(value) is int and re.search("idx|index|number|layer", key):
                    yield index, module, path, key, value


def _stacks(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules within ``model`` that hold others in order, by name."""
    kinds = nn.Sequential, nn.ModuleList
    return [(name, each) for name, each in model.named_modules() if name and type(each) in kinds]


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks that stand beside one alike in a stack, by name."""
    for name, stack in _stacks(model):
        children = list(stack.named_children())
        if [key for key, _ in children] != [str(i) for i in range(len(children))]:
            continue
        for i, (key, block) in enumerate(children):
            neighbours = [x for _, x in children[max(0, i - 1) : i + 2] if x is not block]
            if any(block.children()) and any(_alike(block, neighbour) for neighbour in neighbours):
                yield f"{name}.{key}", block


def _alike(block: nn.Module, neighbour: nn.Module) -> bool:
    shapes = [{n: x.shape for n, x in each.state_dict().items()} for each in (block, neighbour)]
    return type(block) is type(neighbour) and shapes[0] == shapes[1] != {}


def _zeros(block: nn.Module, calls: list[Any]) -> tuple[str, ...] | str:
    """The layers that must be zero for a block to pass on its input; else why there are none."""
    if len(calls) != 1:
        return f"its blocks are called {len(calls)} times"
    args, kwargs, output = calls[0]
    # What a block returns besides, such as weights of attention, is checked with the whole output.
    x, y = next(tensors((args, kwargs)), None), next(tensors(output), None)
    if x is None or y is None or x.shape != y.shape:
        return "what its blocks return is not like what they are given"
    trial = copy.deepcopy(block)
    layers = [
        name
        for name, layer in trial.named_modules()
        if weight_name(layer) in dict(tensors_of(layer))
    ]
    nearest: tuple[str, ...] = ()  # a learned scale may begin so small that nothing seems to change
    # The last layers first: what comes before them then still gets a gradient.
    for zeros in chain(*(combinations(layers[::-1], n + 1) for n in range(MOST_LAYERS))):
        again, further = _copies(args, kwargs)
        with _Silence(trial, zeros), torch.no_grad():
            difference = float((next(tensors(trial(*again, **further))) - x).abs().max())
        if difference == 0.0:
            return zeros
        if not nearest and difference <= EXACT * float(x.abs().max()):
            nearest = zeros
    reason = "its blocks do not pass on what they are given, whatever of their layers is zero"
    return nearest or reason


def _copies(args: Any, kwargs: Any) -> list[Any]:
    """Arguments of a block, with copies of what it may change, such as a cache of keys."""
    return map_leaves([args, kwargs], lambda x: x, copy.deepcopy)


def match_depth(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give stacks as many blocks as a state has for them; their entries are not those of it yet.

    Args:
        model: a module built as before it grew, or the grown one.
        state: ``state_dict()`` of the grown one, or of the other.
    """
    for name, stack in _stacks(model):
        prefix = f"{name}."
        inside = {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
        states = stack.state_dict(), inside
        # By shapes too, unless layers of some blocks have become wider.
        for pair in (states, [dict.fromkeys(each) for each in states]):
            runs, state_runs = map(_runs, pair)
            if [{*names} for names, *_ in runs] == [{*names} for names, *_ in state_runs]:
                break
        else:
            continue
        # From the end, so that the places before stay what they are.
        with numbering(model, name):
            for (_, begin, count), (*_, depth) in [*zip(runs, state_runs, strict=True)][::-1]:
                for position in _copy_positions(count, depth):
                    stack.insert(begin + position, copy.deepcopy(stack[begin + position - 1]))
                for position in _copy_positions(depth, count)[::-1]:
                    del stack[begin + position]


def _copy_positions(count: int, depth: int) -> list[int]:
    """Where copies stand in a run of so many blocks that is deeper now.

    A state does not say it, and blocks may differ in what is no parameter, as windows of attention
    that are shifted in every other one. All were copied, or the first of them once more.
    """
    sources = [i for i in range(count) for _ in range(depth // count + (i < depth % count))]
    return [i for i in range(1, depth) if count < depth and sources[i] == sources[i - 1]]


def _runs(state: Mapping[str, Any]) -> list[tuple[dict[str, Any], int, int]]:
    """Runs of children with the same entries in the state of a stack, as far as shapes are known:
    these by name, the first place, how many."""
    children = defaultdict[int, dict[str, Any]](dict)
    for name, x in state.items():
        index, _, key = name.partition(".")
        if index.isdigit():
            children[int(index)][key] = getattr(x, "shape", None)
    runs: list[tuple[dict[str, Any], int, int]] = []
    for position, entries in sorted(children.items()):
        like, begin, count = runs[-1] if runs else ({}, 0, 0)
        if like == entries and position == begin + count:
            runs[-1] = like, begin, count + 1
        else:
            runs.append((entries, position, 1))
    return runs


class _Silence:
    """Within the block, some layers of a module are zero."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]):
        layers = [module.get_submodule(name) for name in names]
        self._parameters = [p for layer in layers for p in factors_of(layer)]

    def __enter__(self) -> None:
        self._before = [p.detach().clone() for p in self._parameters]
        for p in self._parameters:
            p.data.zero_()

    def __exit__(self, *exception: object) -> None:
        for p, before in zip(self._parameters, self._before, strict=True):
            p.data.copy_(before)
