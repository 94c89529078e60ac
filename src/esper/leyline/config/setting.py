"""A setting: one field of a frozen dataclass, which holds all information about the setting.

The field has a type (a ``Literal`` for a choice), a default and a docstring as usual; ``setting``
adds the rest. The command line, its help, JSON, range checks, suggestions and the rule for resumed
runs are all derived from the field.
"""

import ast
import dataclasses
import inspect
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from esper.leyline.errors import UsageError

Run = str
"""Kinds of run: a policy that learns on growing networks (``growth``) or on a Gymnasium task
(``gym``), the ``heuristic``, or the name of an algorithm."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``, without ``low`` itself if ``open``."""

    low: float
    high: float
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return value <= self.high and (value > self.low if self.open else value >= self.low)

    def __str__(self) -> str:
        low, high = (str(x).replace("e+", "e").removesuffix(".0") for x in (self.low, self.high))
        return (
            f"be above {low} and at most {high}" if self.open else f"lie between {low} and {high}"
        )


def up_to(most: int) -> Range:
    """The range from 1 to ``most``."""
    return Range(1, most)


POSITIVE = Range(0.0, 1e30, open=True)
NOT_NEGATIVE = Range(0.0, 1e30)
FRACTION = Range(0.0, 1.0)
SHARE = Range(0.0, 1.0, open=True)
SEEDS = Range(0, 2**32 - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Properties of a setting besides its type, default and docstring.

    Attributes:
        within: range of its values, if limited; a value of None is never checked.
        aliases: alternative names, on the command line and in JSON.
        only: the kind of run that has the setting; all kinds if None.
        defaults: default per kind of run, where it differs from the default of the field.
        on_resume: whether its value may change when a run is resumed.
        positional: whether it is a positional argument on the command line.
        flag: type of its flag where a command takes it from a function's options; None for none.
        in_recipe: whether the function ``recipe`` of a user's file may give it.
        meaning: its description, if that is not the docstring of the field.
        main: whether ``--help`` shows it where a command has many settings.
    """

    within: Range | None = None
    aliases: tuple[str, ...] = ()
    only: Run | None = None
    defaults: Mapping[Run, Any] = field(default_factory=dict)
    on_resume: bool = False
    positional: bool = False
    flag: Any = None
    in_recipe: bool = False
    meaning: str | None = None
    main: bool = False


def setting(default: Any = MISSING, within: Range | None = None, **more: Any) -> Any:
    """A dataclass field whose metadata hold ``Setting(within=within, **more)``."""
    return field(default=default, metadata={Setting: Setting(within=within, **more)})


def shared(kind: type, name: str, **more: Any) -> Any:
    """A field like the setting ``name`` of ``kind``: same default, range, aliases and docstring.

    ``more`` are properties that differ, such as ``on_resume``.
    """
    field_of_kind = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    common = about(field_of_kind)
    copy = Setting(within=common.within, aliases=common.aliases, on_resume=common.on_resume)
    metadata = {Setting: dataclasses.replace(copy, **more), Origin: Origin(kind, name)}
    return field(default=field_of_kind.default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Origin:
    """The setting that a shared one is a copy of."""

    kind: type
    name: str


def about(field: Field[Any]) -> Setting:
    """The ``Setting`` of a field; ``Setting()`` if the field was not made by ``setting``."""
    return field.metadata.get(Setting) or Setting()


def settings_of(kind: type) -> Mapping[str, Field[Any]]:
    """The settings of a dataclass and of its nested dataclasses, by name."""
    return _settings(kind)


@cache
def _settings(kind: Any) -> Mapping[str, Field[Any]]:  # mypy takes no dataclass for hashable
    settings: dict[str, Field[Any]] = {}
    for part in in_order(kind):
        if isinstance(part.type, type) and dataclasses.is_dataclass(part.type):
            settings |= settings_of(part.type)
        else:
            settings[part.name] = part
    return settings


def in_order(kind: type) -> list[Field[Any]]:
    """The fields of a dataclass; those that it has in common with others come last."""
    return sorted(dataclasses.fields(kind), key=lambda f: f.name not in kind.__annotations__)


def spellings(kind: type) -> dict[str, str]:
    """A map from the name and the aliases of each setting to its name."""
    settings = settings_of(kind).items()
    return {word: name for name, f in settings for word in (name, *about(f).aliases)}


@cache
def meanings(kind: type) -> Mapping[str, str]:
    """The docstrings of the fields of a dataclass, or of those they are copies of, by name."""
    origins = {f.name: f.metadata.get(Origin) for f in dataclasses.fields(kind)}
    texts = {name: meanings(one.kind)[one.name] for name, one in origins.items() if one}
    for base in (base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)):
        # A class of groups alone has no texts, and no source if it was made at run time.
        if all(map(dataclasses.is_dataclass, vars(base).get("__annotations__", {}).values())):
            continue
        (tree,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(tree, ast.ClassDef)
        for node, text in pairwise(tree.body):
            if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(node.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def check_name(name: str | None) -> None:
    """Refuse a name that could not be that of one directory.

    Raises:
        UsageError: names the field and what a name may be.
    """
    if name is not None and re.fullmatch(r"\w[\w.+-]{0,59}", name) is None:
        raise UsageError(
            "name: must be 1 to 60 letters, digits and any of _ . + -, the first a letter, digit "
            f"or _, got {shown(name)}"
        )


def check_ranges(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse values that are out of range.

    Raises:
        UsageError: names the field, its value and the range.
    """
    for name, f in settings_of(kind).items():
        within, value = about(f).within, values.get(name)
        if within is not None and value is not None and value not in within:
            raise UsageError(f"{name}: must {within}, got {value}")


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


def assignments(name: str, texts: Sequence[str], vocabulary: Sequence[str]) -> dict[str, float]:
    """The numbers of a setting that is a list of NAME=VALUE, by name.

    Raises:
        UsageError: no assignment, an unknown name, a name with two
            values, or no number from 0 to 1e6.
    """
    values: dict[str, float] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if key not in vocabulary:
            raise UsageError(f"{name}: {shown(key)} is unknown; there are {', '.join(vocabulary)}")
        try:
            number = float(value) if sign else math.nan
        except ValueError:
            number = math.nan
        if not 0.0 <= number <= 1e6:
            raise UsageError(f"{name}: give {key}=NUMBER from 0 to 1e6, got {shown(text)}")
        if values.get(key, number) != number:
            raise UsageError(f"{name}: {key} has two values; keep one of them")
        values[key] = number
    return values


def _is_strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
