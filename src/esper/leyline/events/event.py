"""Base classes of events, and the representation of numbers in JSON."""

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A finite number, or a string for one that is not finite."""


class Event(msgspec.Struct, kw_only=True, tag_field="event_type"):
    """Base class of all events."""

    time: float
    """Time of the event, in seconds since 1970."""


class RoundEvent(Event):
    """An event that belongs to a round."""

    round: int
    """Number of the round, from 1; 0 before the first round."""


class StepEvent(RoundEvent):
    """An event that belongs to an environment step."""

    step: int
    """Number of the environment step within the round, from 1."""


def number(value: float) -> Number:
    """``value``, or a string if it is not finite, because JSON has no number for it."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def numbers(values: list[float]) -> list[Number]:
    """``number`` of each element."""
    return [number(value) for value in values]


def nested_numbers(values: list[list[float]]) -> list[list[Number]]:
    """``number`` of each element of each row."""
    return [numbers(row) for row in values]


def to_floats(values: Iterable[Number]) -> list[float]:
    """The inverse of ``numbers``."""
    return [float(value) for value in values]
