"""The events of a run: one typed schema, one line of JSON per event.

A float that is not finite is written as the string ``NaN``, ``Infinity`` or ``-Infinity``, never as
null; null means missing. Fields that a newer schema adds have defaults, so lines of an older schema
can still be read. ``scripts/write_event_docs.py`` generates docs/events.md from this package.
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
    POINTS,
    AnalyticsSnapshot,
    AnomalyDetected,
    CheckpointSaved,
    CounterfactualMatrixComputed,
    EpisodeOutcome,
    EpisodeStarted,
    GymEpisodes,
    PolicyUpdateCompleted,
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
    SeedContributions,
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
    "POINTS",
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
    "PolicyUpdateCompleted",
    "RoundEvent",
    "SeedContributions",
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

SCHEMA_VERSION = 4
"""Schema 4 added the test scores of EPISODE_OUTCOME. Schema 3 added EPISODE_STARTED,
DECISIONS_MADE, ANOMALY_DETECTED, TELEMETRY_DROPPED, GYM_EPISODES and UPDATE_REFUSED, and all other
fields that have a default."""

_LEVELS = ("off", "minimal", "normal", "debug")
_LEAST: dict[type[Event], str] = {
    TrainingStarted: "minimal",
    EpisodeStarted: "minimal",
    DecisionsMade: "normal",
    EpochCompleted: "normal",
    SeedContributions: "normal",
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
    PolicyUpdateCompleted: "minimal",
    UpdateRefused: "minimal",
    AnalyticsSnapshot: "minimal",
    AnomalyDetected: "minimal",
    TelemetryDropped: "minimal",
    CheckpointSaved: "minimal",
    TrainingFinished: "minimal",
}
"""The lowest telemetry level that writes each kind of event, in the order of docs/events.md."""

LEVELS: dict[str, tuple[type[Event], ...]] = {
    level: tuple(kind for kind, least in _LEAST.items() if least in _LEVELS[: place + 1])
    for place, level in enumerate(_LEVELS)
}
"""The kinds of events that each telemetry level writes."""


def event_type(kind: type[Event]) -> str:
    """The name in JSON of a kind of event, such as ``EPOCH_COMPLETED``."""
    return str(kind.__struct_config__.tag)


EVENTS: dict[str, type[Event]] = {event_type(kind): kind for kind in _LEAST}
"""The kinds of events by name, in the order of docs/events.md."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Union[tuple(EVENTS.values())])  # noqa: UP007


def encode(event: Event) -> bytes:
    """The event as one line of JSON, without the newline."""
    return _encoder.encode(event)


def decode(line: bytes | str) -> Any:
    """Decode the event of one line, of this schema or an older one.

    Raises:
        msgspec.DecodeError: the line is not an event.
    """
    return _decoder.decode(line)
