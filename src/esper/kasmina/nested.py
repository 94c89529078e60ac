"""Tensors and other values in nested tuples, lists, dicts and dataclasses."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def leaves(value: object) -> Iterator[object]:
    """Tensors in nested dicts, tuples, lists and dataclasses, and what may hold others."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from leaves(getattr(value, each.name))
    elif value is not None and not isinstance(value, bool | int | float | str):
        yield value


def tensors(value: object) -> Iterator[Tensor]:
    """The tensors among the leaves."""
    return (each for each in leaves(value) if isinstance(each, Tensor))


def map_leaves(
    value: Any, change: Callable[[Tensor], Any], change_other: Callable[[Any], Any] = lambda x: x
) -> Any:
    """``value`` with its leaves replaced, those of nested tuples, lists and dicts.

    Args:
        value: a tensor, another value, or tuples (also with names), lists and dicts of such. A
            ``PackedSequence`` is a leaf.
        change: what takes the place of a tensor.
        change_other: what takes the place of another value.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_leaves(x, change, change_other) for key, x in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, PackedSequence):
        return rebuilt(value, [map_leaves(x, change, change_other) for x in value])
    return change_other(value)


def rebuilt(like: Any, parts: list[Any]) -> Any:
    """A tuple, named tuple or list of the type of ``like`` with other elements."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def entries_of(holder: Any) -> dict[str, Any]:
    """The attributes of an object by name, where they can be changed; of a dict its entries."""
    is_named = isinstance(holder, dict) and all(isinstance(key, str) for key in holder)
    return holder if is_named else getattr(holder, "__dict__", {})


def below(name: str, ancestor: str) -> bool:
    """Whether a module lies within another, or is the same; by their names."""
    return name == ancestor or name.startswith(f"{ancestor}.")
