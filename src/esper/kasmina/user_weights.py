"""Weights that are parameters of a user's module, by which functions multiply what they read.

Such a module is no layer of torch's, but ``x @ self.weight`` or ``F.linear(x, self.weight)``
computes what one would, also with a weight that is computed of parameters: ``self.weight * scale``
or, of several experts, ``self.weight[i]``.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.kasmina.attention_heads import head_attributes
from esper.kasmina.layer_kinds import is_bare_norm, is_of_user, numbers_of, size_of, tensors_of
from esper.kasmina.nested import tensors

_MATMULS = "matmul", "__matmul__", "mm", "bmm", "grouped_mm", "_grouped_mm"
_OPERANDS = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), ("input", "weight", "bias")),
    **dict.fromkeys(_MATMULS, ("input", "weight")),
    "addmm": ("bias", "input", "weight"),
}
Owners = Mapping[int, tuple[str, nn.Module, tuple[str, ...]]]
"""By the id of a tensor, the module of whose parameters it is computed, and their names there."""
Axes = tuple[int, int]
"""The axes of a weight that belong to what is written, and to what is read."""


@dataclass(frozen=True, slots=True)
class Product:
    """What a function multiplies by what, as a linear layer or a convolution does.

    Attributes:
        input, weight, bias: its operands; None if there is no bias.
        axes: of the weight.
        reads, writes: the axis of channels in the input and in the output, from the end.
    """

    input: Tensor
    weight: Tensor
    bias: Any
    axes: Axes
    reads: int
    writes: int


def product_of(function: str, args: Any, kwargs: Any) -> Product | None:
    """The product that a function computes, if it has an input and a weight."""
    if function == "einsum":
        return _product_of_einsum(*args)
    operands = dict(zip(_OPERANDS.get(function, ()), args, strict=False)) | kwargs
    x, weight, bias = (operands.get(key) for key in ("input", "weight", "bias"))
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.ndim < 2:
        return None
    is_convolution = function.startswith("conv")
    axes = (0, 1) if is_convolution or function == "linear" else (weight.ndim - 1, weight.ndim - 2)
    axis = 1 - weight.ndim if is_convolution else -1
    return Product(x, weight, bias, axes, axis, axis)


def _product_of_einsum(equation: Any, *operands: Any) -> Product | None:
    """The same where the second of two operands is the weight; of ``edh`` it writes the last."""
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    x, weight = inputs.split(",")
    columns = [letter for letter in weight if letter in x and letter not in output]
    rows = [letter for letter in weight if letter in output and letter not in x]
    if not columns or not rows:
        return None
    first, row, column = operands[1].ndim - len(weight), rows[-1], columns[0]
    axes = first + weight.index(row), first + weight.index(column)
    return Product(*operands, None, axes, x.index(column) - len(x), output.index(row) - len(output))


@dataclass(frozen=True, slots=True)
class UserWeight:
    """The weight of a product, which is computed of parameters of a user's module.

    Attributes:
        names: full names of the parameters and buffers of which it is computed.
        biases: those of which the bias is.
        module: the user's module.
        axes: those of each of ``names``.
        product: where it is used.
    """

    names: tuple[str, ...]
    biases: tuple[str, ...]
    module: nn.Module
    axes: tuple[Axes, ...]
    product: Product


def user_weight(function: str, args: Any, kwargs: Any, owners: Owners) -> UserWeight | None:
    """The weight of a user's module by which a function multiplies what it reads, if it does."""
    product = product_of(function, args, kwargs)
    if product is None or id(product.weight) not in owners:
        return None
    name, module, keys = owners[id(product.weight)]
    matrices = {key: each for key, each in tensors_of(module) if key in keys and each.numel() > 1}
    axes = [_axes(product, each) for each in matrices.values()]
    pairs = tuple(each for each in axes if each is not None)
    is_learned = any(isinstance(each, nn.Parameter) for each in matrices.values())
    if len(pairs) < len(axes) or not (is_learned and is_of_user(module)):
        return None
    holder, _, entries = owners.get(id(product.bias), ("", module, ()))
    names, biases = (
        tuple(f"{prefix}.{key}".lstrip(".") for key in part)
        for prefix, part in ((name, matrices), (holder, entries))
    )
    return UserWeight(names, biases, module, pairs, product)


def _axes(product: Product, x: Tensor) -> Axes | None:
    """The axes that a weight has in a parameter of which it is computed; None if none.

    The parameter may have further axes before, as of several experts.
    """
    weight, (rows, columns) = product.weight, product.axes
    pair = rows - weight.ndim, columns - weight.ndim
    is_view = weight.ndim == x.ndim and weight.mT.is_set_to(x)
    for row, column in (pair[::-1],) if is_view else (pair, pair[::-1]):
        lengths = [x.shape[axis] for axis in (row, column) if x.ndim >= -axis]
        if lengths == [weight.shape[rows], weight.shape[columns]]:
            return x.ndim + row, x.ndim + column
    return None


def later_numbers(
    model: nn.Module, before: Mapping[int, torch.Size]
) -> Iterator[tuple[nn.Module, str, int]]:
    """Numbers of channels that users' modules or norms hold, where tensors have become longer.

    A module does not say which of its numbers are sizes: one is if its name is that of a size, and
    if all axes of that size, in it and in the modules that it holds, have become as long. Where
    only those that read have, it counts them unless its name says ``out``, and the reverse. A norm
    without parameters has as many channels as the next module reads; as that may be the one of a
    condition, which reads others, norms of one size follow their majority.

    Args:
        model: the module that has become wider.
        before: the shape that a tensor had, by the id of what replaces it.

    Yields:
        the module, the name of the attribute and its new value.
    """
    yield from _later_norms(list(model.modules()), before)
    for module in model.modules():
        # Where heads are counted, a size may be their number, and theirs follow by other rules.
        is_plain = is_of_user(module) and not head_attributes(module)
        numbers = numbers_of(module) if is_plain else []
        later = defaultdict[tuple[int, int], set[int]](set)
        for x in chain(module.parameters(), module.buffers()) if numbers else ():
            for axis, size in enumerate(before.get(id(x), x.shape)):
                later[size, min(axis, 1)].add(x.shape[axis])
        for key, size in numbers:
            side, further = (later[size, axis] for axis in ((0, 1) if "out" in key else (1, 0)))
            sizes = side if further == {size} else side | further
            if size > 1 and len(sizes) == 1 and size not in sizes:
                yield module, key, min(sizes)


def _later_norms(
    modules: Sequence[nn.Module], before: Mapping[int, torch.Size]
) -> Iterator[tuple[nn.Module, str, int]]:
    """The same of norms without parameters; those of one size have another if most have."""
    sizes = {i: size_of(x, "normalized_shape") for i, x in enumerate(modules) if is_bare_norm(x)}
    votes = defaultdict[int, Counter[int]](Counter)
    for i, size in sizes.items():
        votes[size][_size_behind(modules[i:], before, size)] += 1
    for i, size in sizes.items():
        ((new, _),) = votes[size].most_common(1)
        if new != size:
            yield modules[i], "normalized_shape", new


def _size_behind(modules: Sequence[nn.Module], before: Mapping[int, torch.Size], size: int) -> int:
    """What has become of a number of columns, or of rows, in the first module that has as many."""
    for module in modules:
        tensors = [x for _, x in tensors_of(module) if x.ndim > 1]
        shapes = [(before.get(id(x), x.shape), x.shape) for x in tensors]
        sizes = [new[axis] for axis in (1, 0) for old, new in shapes if old[axis] == size]
        if sizes:
            return sizes[0]
    return size


class Readings(TorchFunctionMode):
    """Notes what weights read, channels last, and the gradients of what is made of it.

    Args:
        weights: some parameters, by name.
        records: gets both by name, call by call, and the parameter, see ``new_units.Record``.
    """

    def __init__(
        self, weights: Mapping[str, Tensor],
        records: dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]],
    ):  # fmt: skip
        super().__init__()
        records |= {name: ([], [], [x]) for name, x in weights.items()}
        self._records, self._names = records, {id(x): (name, x) for name, x in weights.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output, name = func(*args, **kwargs), getattr(func, "__name__", "")
        product = product_of(name, args, kwargs)
        if product is not None and id(product.weight) in self._names:
            activations, gradients, _ = self._records[self._names[id(product.weight)][0]]
            if output.requires_grad:
                activations.append(product.input.detach().movedim(product.reads, -1))
                output.register_hook(lambda gradient: gradients.append(gradient.detach()))
        elif isinstance(output, Tensor):
            # What is computed of a weight and numbers alone counts as it.
            inputs = [x for x in tensors((args, kwargs)) if x.numel() > 1]
            names = {self._names.get(id(x), ("",))[0] for x in inputs}
            if len(names) == 1 and (name := names.pop()):
                self._names[id(output)] = name, output
        return output
