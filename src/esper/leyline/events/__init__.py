"""The events of a run: one typed schema, one JSON line an event.

A float that is not finite is written as the text ``NaN``, ``Infinity`` or ``-Infinity``, never as
null; null means missing. Fields that a newer schema adds have defaults, so lines of an older one
are read as well. docs/events.md is made from this package by ``scripts/write_event_docs.py``.
"""

from typing import Any, Union

import msgspec

from esper.leyline.events.event import (
    Event,
    Number,
    RoundEvent,
    StepEvent,
    nested_numbers,
    number,
    numbers,
    to_floats,
)
from esper.leyline.events.rounds import (
    AnalyticsSnapshot,
    AnomalyDetected,
    CheckpointSaved,
    CounterfactualMatrixComputed,
    EpisodeOutcome,
    EpisodeStarted,
    GymEpisodes,
    PPOUpdateCompleted,
    TelemetryDropped,
    TrainingFinished,
    TrainingStarted,
    UpdateRefused,
)
from esper.leyline.events.steps import (
    DecisionsMade,
    EpochCompleted,
    GovernorRollback,
    SeedEvent,
    SeedFossilized,
    SeedGerminated,
    SeedPruned,
    SeedSignalsMeasured,
    SeedStageChanged,
)

__all__ = [
    "EVENTS",
    "LEVELS",
    "SCHEMA_VERSION",
    "AnalyticsSnapshot",
    "AnomalyDetected",
    "CheckpointSaved",
    "CounterfactualMatrixComputed",
    "DecisionsMade",
    "EpisodeOutcome",
    "EpisodeStarted",
    "EpochCompleted",
    "Event",
    "GovernorRollback",
    "GymEpisodes",
    "Number",
    "PPOUpdateCompleted",
    "RoundEvent",
    "SeedEvent",
    "SeedFossilized",
    "SeedGerminated",
    "SeedPruned",
    "SeedSignalsMeasured",
    "SeedStageChanged",
    "StepEvent",
    "TelemetryDropped",
    "TrainingFinished",
    "TrainingStarted",
    "UpdateRefused",
    "decode",
    "encode",
    "event_type",
    "nested_numbers",
    "number",
    "numbers",
    "to_floats",
]

SCHEMA_VERSION = 3
"""2 had none of EPISODE_STARTED, DECISIONS_MADE, ANOMALY_DETECTED, TELEMETRY_DROPPED, GYM_EPISODES
and UPDATE_REFUSED, and none of the fields that have a default."""

_LEVELS = ("off", "minimal", "normal", "debug")
_LEAST: dict[type[Event], str] = {
    TrainingStarted: "minimal",
    EpisodeStarted: "minimal",
    DecisionsMade: "normal",
    EpochCompleted: "normal",
    SeedSignalsMeasured: "debug",
    SeedGerminated: "normal",
    SeedStageChanged: "normal",
    SeedFossilized: "normal",
    SeedPruned: "normal",
    GovernorRollback: "minimal",
    EpisodeOutcome: "minimal",
    CounterfactualMatrixComputed: "normal",
    GymEpisodes: "minimal",
    PPOUpdateCompleted: "minimal",
    UpdateRefused: "minimal",
    AnalyticsSnapshot: "minimal",
    AnomalyDetected: "minimal",
    TelemetryDropped: "minimal",
    CheckpointSaved: "minimal",
    TrainingFinished: "minimal",
}
"""Every kind of event in the order in which a round emits them, with the least level at which it is
written."""

LEVELS: dict[str, tuple[type[Event], ...]] = {
    level: tuple(kind for kind, least in _LEAST.items() if least in _LEVELS[: place + 1])
    for place, level in enumerate(_LEVELS)
}
"""Which events each telemetry level writes."""


def event_type(kind: type[Event]) -> str:
    """The name of a kind of event in JSON, such as ``EPOCH_COMPLETED``."""
    return str(kind.__struct_config__.tag)


EVENTS: dict[str, type[Event]] = {event_type(kind): kind for kind in _LEAST}
"""Every kind of event by its name, in the order in which a round emits them."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Union[tuple(EVENTS.values())])  # noqa: UP007


def encode(event: Event) -> bytes:
    """The event as one line of JSON, without the newline."""
    return _encoder.encode(event)


def decode(line: bytes | str) -> Any:
    """The event of one line, of this schema or an older one.

    Raises:
        msgspec.DecodeError: the line is no event.
    """
    return _decoder.decode(line)
