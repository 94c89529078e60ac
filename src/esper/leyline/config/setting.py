"""A setting: a field of a frozen dataclass that says everything there is to know about it.

Type (with the choices, where it is a ``Literal``), default and docstring stand in the field as
usual; what else there is, in ``setting``. Command line, help, JSON, ranges, suggestions and the
rule for resumed runs read the field.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Literal

from esper.leyline.errors import UsageError

Run = Literal["growth", "gym", "heuristic"]
"""Kinds of run: PPO on growing networks, PPO on a Gymnasium task, the heuristic."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``, or from just above ``low`` where that is open."""

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
    """Whole numbers from 1 on, with the most that makes sense."""
    return Range(1, most)


POSITIVE = Range(0.0, 1e30, open=True)
NOT_NEGATIVE = Range(0.0, 1e30)
FRACTION = Range(0.0, 1.0)
SHARE = Range(0.0, 1.0, open=True)
SEEDS = Range(0, 2**32 - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a field says besides its type, its default and its meaning.

    Attributes:
        within: where its values lie, unless None; None itself may always be given.
        aliases: other spellings, on the command line and in JSON.
        only: the kind of run that has it, where not all have.
        defaults: defaults of other kinds of run, where they differ.
        on_resume: whether a resumed run may have another value.
        positional: whether it stands on the command line without a flag.
    """

    within: Range | None = None
    aliases: tuple[str, ...] = ()
    only: Run | None = None
    defaults: Mapping[Run, Any] = field(default_factory=dict)
    on_resume: bool = False
    positional: bool = False


def setting(default: Any = MISSING, within: Range | None = None, **more: Any) -> Any:
    """A field of a dataclass with ``Setting(within=within, **more)``."""
    return field(default=default, metadata={Setting: Setting(within=within, **more)})


def about(field: Field[Any]) -> Setting:
    """What a field says besides its type, its default and its meaning."""
    return field.metadata.get(Setting) or Setting()


def settings_of(kind: type) -> Mapping[str, Field[Any]]:
    """The settings of a dataclass and of the dataclasses that are its fields, by name."""
    return {f.name: f for f in _settings(kind)}


def _settings(kind: type) -> Iterator[Field[Any]]:
    for own in dataclasses.fields(kind):
        if isinstance(own.type, type) and dataclasses.is_dataclass(own.type):
            yield from _settings(own.type)
        else:
            yield own


def spellings(kind: type) -> dict[str, str]:
    """The name of each setting by its name and by its aliases."""
    settings = settings_of(kind).items()
    return {word: name for name, f in settings for word in (name, *about(f).aliases)}


def check_ranges(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse values out of range.

    Raises:
        UsageError: names the field, its value and the range.
    """
    for name, f in settings_of(kind).items():
        within, value = about(f).within, values.get(name)
        if within is not None and value is not None and value not in within:
            raise UsageError(f"{name}: must {within}, got {value}")
