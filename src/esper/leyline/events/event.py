"""What all events share, and how numbers stand in JSON."""

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number, or the text of one that is not finite."""


class Event(msgspec.Struct, kw_only=True, tag_field="event_type"):
    """What all events share."""

    time: float
    """When it happened, seconds since 1970."""


class RoundEvent(Event):
    """What belongs to a round."""

    round: int
    """The round it belongs to, from 1; 0 before the first."""


class StepEvent(RoundEvent):
    """What belongs to an environment step."""

    step: int
    """The environment step of the round, from 1."""


def number(value: float) -> Number:
    """``value``, as text where JSON has no number for it."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def numbers(values: list[float]) -> list[Number]:
    """``number`` of every element."""
    return [number(value) for value in values]


def nested_numbers(values: list[list[float]]) -> list[list[Number]]:
    """``number`` of every element of every row."""
    return [numbers(row) for row in values]


def to_floats(values: Iterable[Number]) -> list[float]:
    """The floats that ``numbers`` wrote."""
    return [float(value) for value in values]
