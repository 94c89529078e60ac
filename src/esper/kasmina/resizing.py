"""A module that is built as before it grew gets the sizes of one that has grown."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.attention_heads import head_counts
from esper.kasmina.layer_kinds import (
    Recurrent,
    Table,
    gates_of,
    group_counts,
    holder_of,
    is_of_user,
    layer_and_key,
    rows_first,
    set_size,
    size_names,
    tensors_of,
    weight_name,
)
from esper.kasmina.user_weights import later_numbers
from esper.kasmina.wider_layers import exchange, join_weights, put


def resize(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None
) -> list[str]:
    """Give layers the sizes that a state has for them, as those of a widened module.

    Their entries are not those of the state yet. Other modules stay as they are.

    Args:
        model: a module built as before it grew.
        state: ``state_dict()`` of the grown one.
        optimizer: trains the module; it gets the new parameters, without a state.

    Returns:
        the names of the layers whose size differences.
    """
    names, later, before = list[str](), dict[int, Tensor](), dict[int, torch.Size]()
    ratios: tuple[dict[str, Fraction], ...] = {}, {}
    for name, module in model.named_modules():
        weight = dict(tensors_of(module)).get(key := weight_name(module))
        like = state.get(f"{name}.{key}")
        if weight is not None and isinstance(like, Tensor) and weight.ndim > 1:
            shapes = rows_first(module, weight).shape, rows_first(module, like).shape
            for of_axis, size, wide in zip(ratios, *shapes, strict=False):
                if size != wide:
                    of_axis[name] = Fraction(wide, size)
    for module, key, size in list(head_counts(model, *ratios)):
        setattr(module, key, size)
    for name, module in model.named_modules():
        attributes = size_names(module)
        prefix = f"{name}." if name else ""
        tensors = [(key, x, state.get(prefix + key)) for key, x in tensors_of(module)]
        differences = [
            (k, x, y) for k, x, y in tensors if isinstance(y, Tensor) and y.shape != x.shape
        ]
        if not differences or not (attributes or is_of_user(module)):
            continue
        names.append(name)
        for key, x, like in differences:
            value = x.detach().new_zeros(like.shape)
            is_parameter = isinstance(x, nn.Parameter)
            new = nn.Parameter(value, x.requires_grad) if is_parameter else value
            put(module, key, later.setdefault(id(x), new))
            before[id(later[id(x)])] = x.shape
            if key in (weight_name(module), "running_mean") or "normalized_shape" in attributes:
                sizes = list(rows_first(module, like).shape)
                if isinstance(module, Recurrent):
                    sizes[0] //= gates_of(module)
                if counts := group_counts(module):
                    attributes += counts
                    sizes = [getattr(module, each) * len(like) // len(x) for each in attributes]
                for attribute, size in zip(attributes, sizes, strict=False):
                    set_size(module, attribute, size)
        join_weights(module)
    for module, key, size in list(later_numbers(model, before)):
        set_size(module, key, size)
    if optimizer is not None:
        exchange(optimizer, later)
    return names


def is_wider(model: nn.Module, name: str, shape: torch.Size) -> bool:
    """Whether ``resize`` can give a parameter or buffer, by its full name, a shape."""
    layer, key = layer_and_key(name)
    try:
        module = model.get_submodule(layer)
        holder, entry = holder_of(module, key)
    except AttributeError:
        return False
    before = holder.get(entry)
    if before is None or before.ndim != len(shape):
        return False
    changes = [new - old for new, old in zip(shape, before.shape, strict=True)]
    is_known = bool(size_names(module)) or is_of_user(module)
    is_table_of_more = isinstance(module, Table) and changes[0] != 0
    return is_known and not is_table_of_more and min(changes) >= 0
