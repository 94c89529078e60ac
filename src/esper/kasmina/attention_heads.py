"""Attributes in which a module counts its heads of attention, which a wider one has more of.

A module does not say which of its numbers these are, and neither does the state of a wider one:
both who widens it and who loads it later go by their names, and by the sizes of its layers.
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import groupby
from typing import Any

from torch import nn

from esper.kasmina.layer_kinds import Linear, size_names
from esper.kasmina.nested import below

_OF_ONE_HEAD = ("dim", "size", "width", "feature", "channel", "embd", "per_head")
_OUTPUT = re.compile(r"(^|[._])(o|out|output|wo)([._]|$)", re.IGNORECASE)
_POSITIONS = re.compile("^(?!.*(dim|emb(?!eddings))).*(len|seq|block|pos|window|token|patch)")
_LAYERS = Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def head_attributes(module: nn.Module) -> list[str]:
    """Names of the attributes that count the heads of a module, and of those that are the size of a
    layer, as the width of all heads; none of a module without heads."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int}
    counts = [name for name in numbers if _counts_heads(name)]
    layers = _layers(module).values() if counts else ()
    sizes = {size for layer in layers for size in _sizes(layer)}
    return [
        x for x, n in numbers.items() if x in counts or (n in sizes and not _POSITIONS.search(x))
    ]


def head_counts(
    model: nn.Module, rows: Mapping[str, Fraction], columns: Mapping[str, Fraction]
) -> Iterator[tuple[nn.Module, str, int]]:
    """What attributes of modules hold that count heads, when their layers have become wider.

    These are modules whose first layers, as they are registered, compute queries, keys and values,
    and whose last ones, or those with such a name, read what attention makes of them; there are no
    others.

    Args:
        model: the module, before its layers become wider.
        rows: by the name of a layer, how many times as many rows it gets, if not as many.
        columns: as much of its columns.

    Yields:
        the module, the name of the attribute and its new value.
    """
    of_heads = set[str]()  # layers that compute a number for each, as of the distance of positions
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Transformer):
            first = f"{prefix}.encoder.layers.0.self_attn.out_proj".lstrip(".")
            for name in ("d_model", "nhead"):
                yield module, name, int(getattr(module, name) * rows.get(first, 1))
            continue
        in_order = sorted(_layers(module).items(), key=lambda each: bool(_OUTPUT.search(each[0])))
        layers = {f"{prefix}.{name}".lstrip("."): x for name, x in in_order}
        names, wider = head_attributes(module), list(layers)
        is_of_heads = bool(wider) and of_heads.issuperset(wider)
        heads = {getattr(module, name) for name in names if _counts_heads(name)}
        for child, part in groupby(in_order, lambda each: each[0].partition(".")[0]):
            sizes = [_sizes(layer) for _, layer in part]
            if sizes[-1][0] in heads and {n for _, n in sizes} != {sizes[-1][0]}:  # or they talk
                of_heads |= {x for x in layers if below(x, f"{prefix}.{child}".lstrip("."))}
        wider = wider[-1:] if is_of_heads else [x for x in wider if x not in of_heads]
        factor = rows.get(wider[0]) if names and wider else None
        ends = [
            end
            for end in range(1, len(wider) + is_of_heads)
            if all(rows.get(name) == factor for name in wider[:end])
            and all(columns.get(name) == factor for name in wider[end:])
        ]
        if factor is None or not ends:
            continue
        widths = {_sizes(layers[name])[i >= ends[-1]] for i, name in enumerate(wider)}
        for name in names:
            later = getattr(module, name) * factor
            if later.denominator == 1 and (_counts_heads(name) or getattr(module, name) in widths):
                yield module, name, later.numerator


def _layers(module: nn.Module) -> dict[str, _LAYERS]:
    """The linear layers and convolutions of a module, by name."""
    return {name: x for name, x in module.named_modules() if isinstance(x, _LAYERS)}


def _sizes(layer: Any) -> tuple[int, ...]:
    """How many channels a layer writes, and how many it reads."""
    return tuple(getattr(layer, name) for name in size_names(layer))


def _counts_heads(name: str) -> bool:
    """Whether an attribute of this name holds a number of heads."""
    words = name.lower()
    return words in ("h", "nh") or ("head" in words and not any(x in words for x in _OF_ONE_HEAD))
