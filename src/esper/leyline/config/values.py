"""Conversion of the values of settings to the type of a field or to text for messages."""

import reprlib
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from esper.leyline.errors import UsageError


def options_of(kind: Any) -> tuple[Any, ...]:
    """The members of a field's type if it is a union, or else the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def description(kind: Any) -> str:
    """The values that a field's type accepts, in words for a message."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of names"
    if len(options_of(kind)) > 1:
        return " or ".join(description(option) for option in options_of(kind))
    names = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a string",
        NoneType: "null",
        Path: "a path",
    }
    return names[kind]


def shown(value: Any) -> str:
    """A user's value for a message, shortened if it is long or deeply nested."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def typed(name: str, value: Any, kind: Any) -> Any:
    """``value`` converted to the type of the field ``name``.

    Raises:
        UsageError: the value has another type; names the expected one.
    """
    for option in options_of(kind):
        if option is NoneType and value is None:
            return None
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if get_origin(option) is tuple and isinstance(value, str):
            return (value,)
        if get_origin(option) is tuple and _is_strings(value):
            return tuple(value)
        if option is bool and isinstance(value, bool):
            return value
        if option is float and type(value) in (int, float) and abs(value) < 1e300:
            return float(value)
        if option in (int, str) and type(value) is option:
            return value
    raise UsageError(f"{name}: must be {description(kind)}, got {shown(value)}")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
