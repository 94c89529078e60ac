"""The events of a run: one typed schema, one JSON line an event.

Values of all environments stand in one array, so a step costs one line. A float that is not finite
is written as the text ``NaN``, ``Infinity`` or ``-Infinity``, never as null; null means missing.
"""

import math
from collections.abc import Iterable
from typing import Any

import msgspec

SCHEMA_VERSION = 2

Number = float | int | str
"""A number, or the text of one that is not finite."""


class Event(msgspec.Struct, kw_only=True, tag_field="event_type"):
    """What all events share. ``time`` is seconds since 1970."""

    time: float


class TrainingStarted(Event, tag="TRAINING_STARTED"):
    """A process began to train. ``round`` is the number of rounds that were done before.

    ``slots`` and ``host_parameters`` hold one entry a task. ``gym`` is the Gymnasium environment
    where it is one that is learned; ``episode_length`` is then the steps of a round.
    """

    schema: int
    round: int
    rounds: int
    tasks: list[str]
    policy: str
    envs: int
    group_size: int
    episode_length: int
    slots: list[list[str]]
    host_parameters: list[int]
    device: str
    amp_enabled: bool
    gym: str | None = None


class EpochCompleted(Event, tag="EPOCH_COMPLETED"):
    """One environment step. Lists hold one value an environment; slot lists one list each.

    Stage 0 stands for a slot that the environment's host does not have.
    """

    round: int
    step: int
    train_loss: list[Number]
    train_accuracy: list[Number]
    validation_loss: list[Number]
    validation_accuracy: list[Number]
    expected_accuracy: list[Number]
    twin_validation_accuracy: list[Number]
    twin_expected_accuracy: list[Number]
    reward: list[Number]
    added_parameters: list[int]
    op: list[int]
    slot: list[int]
    success: list[bool]
    stage: list[list[int]]
    blueprint: list[list[int]]
    alpha: list[list[Number]]


class SeedSignalsMeasured(Event, tag="SEED_SIGNALS_MEASURED"):
    """Debug level: what was measured of every seed, ``[environment][slot]``."""

    round: int
    step: int
    contribution: list[list[Number]]
    gradient_norm: list[list[Number]]
    gradient_health: list[list[Number]]


class SeedEvent(Event):
    """Seeds to which the same happened in one step; the lists are parallel."""

    round: int
    step: int
    environment: list[int]
    slot: list[int]
    blueprint: list[str]


class SeedGerminated(SeedEvent, tag="SEED_GERMINATED"):
    """Seeds were born."""


class SeedStageChanged(SeedEvent, tag="SEED_STAGE_CHANGED"):
    """Slots went from one stage to another."""

    previous: list[str]
    stage: list[str]


class SeedFossilized(SeedEvent, tag="SEED_FOSSILIZED"):
    """Seeds were kept for good."""

    parameters: list[int]


class SeedPruned(SeedEvent, tag="SEED_PRUNED"):
    """Seeds were removed."""


class GovernorRollback(Event, tag="GOVERNOR_ROLLBACK"):
    """Hosts that had diverged were put back to their snapshots; the lists are parallel.

    ``reason`` is NOT_FINITE, COLLAPSE or RUNAWAY.
    """

    round: int
    step: int
    environment: list[int]
    reason: list[str]


class CounterfactualMatrixComputed(Event, tag="COUNTERFACTUAL_MATRIX_COMPUTED"):
    """What each seed was worth at the end of an episode, in expected accuracy.

    ``shapley`` is ``[environment][slot]``, ``interactions`` ``[environment][slot][slot]``; NaN
    where no seed acted.
    """

    round: int
    shapley: list[list[Number]]
    interactions: list[list[list[Number]]]


class EpisodeOutcome(Event, tag="EPISODE_OUTCOME"):
    """A round's episodes, one value an environment.

    ``accuracy`` is committed: validation accuracy with fossilised seeds alone. ``utility`` is
    that of the last step, ``twin_utility`` its never-grow twin's.
    """

    round: int
    task: list[str]
    utility: list[Number]
    twin_utility: list[Number]
    accuracy: list[Number]
    twin_accuracy: list[Number]
    expected_accuracy: list[Number]
    twin_expected_accuracy: list[Number]
    episode_return: list[Number]
    added_parameters: list[int]
    germinated: list[int]
    fossilised: list[int]
    pruned: list[int]
    rolled_back: list[int]


class GymEpisodes(Event, tag="GYM_EPISODES"):
    """Episodes of a Gymnasium task that ended in a round; the lists are parallel.

    ``episode_return`` is the sum of the rewards as the environment paid them; ``terminated`` is
    false where the episode was cut off.
    """

    round: int
    environment: list[int]
    episode_return: list[Number]
    length: list[int]
    terminated: list[bool]


class PPOUpdateCompleted(Event, tag="PPO_UPDATE_COMPLETED"):
    """One update of the policy; ``metrics`` by name, such as ``head_grad_norms/op``.

    A metric that is null is missing: the norm of a gradient that does not exist.
    """

    round: int
    update: int
    metrics: dict[str, Number | None]


class UpdateRefused(Event, tag="UPDATE_REFUSED"):
    """An update met a number that is not finite and left the weights as they were.

    ``tensor`` is the first that held one; ``file``, relative to the run directory, replays it;
    ``in_a_row`` counts the updates in a row to which it happened.
    """

    round: int
    tensor: str
    file: str
    in_a_row: int


class AnalyticsSnapshot(Event, tag="ANALYTICS_SNAPSHOT"):
    """Throughput and precision of a round; seconds are wall time.

    ``learning_rates`` holds the step size of each group of parameters; ``amp_scale`` the loss
    scale where half precision needs one.
    """

    round: int
    amp_enabled: bool
    amp_dtype: str | None
    learning_rate: float | None
    environment_steps_per_second: float
    rollout_seconds: float
    update_seconds: float
    learning_rates: dict[str, float] = {}
    amp_policy: bool = False
    amp_scale: float | None = None


class CheckpointSaved(Event, tag="CHECKPOINT_SAVED"):
    """A round is safe on disk."""

    round: int
    path: str


class TrainingFinished(Event, tag="TRAINING_FINISHED"):
    """The process ended as ``finished``, ``interrupted`` or ``failed``."""

    round: int
    status: str


AnyEvent = (
    TrainingStarted
    | EpochCompleted
    | SeedSignalsMeasured
    | SeedGerminated
    | SeedStageChanged
    | SeedFossilized
    | SeedPruned
    | GovernorRollback
    | CounterfactualMatrixComputed
    | EpisodeOutcome
    | GymEpisodes
    | PPOUpdateCompleted
    | UpdateRefused
    | AnalyticsSnapshot
    | CheckpointSaved
    | TrainingFinished
)

LEVELS: dict[str, tuple[type[Event], ...]] = {
    "off": (),
    "minimal": (
        TrainingStarted,
        GovernorRollback,
        EpisodeOutcome,
        GymEpisodes,
        PPOUpdateCompleted,
        UpdateRefused,
        AnalyticsSnapshot,
        CheckpointSaved,
        TrainingFinished,
    ),
}
LEVELS["normal"] = (
    *LEVELS["minimal"],
    EpochCompleted,
    SeedGerminated,
    SeedStageChanged,
    SeedFossilized,
    SeedPruned,
    CounterfactualMatrixComputed,
)
LEVELS["debug"] = (*LEVELS["normal"], SeedSignalsMeasured)
"""Which events each telemetry level writes."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """The event as one line of JSON, without the newline."""
    return _encoder.encode(event)


def decode(line: bytes | str) -> Any:
    """The event of one line.

    Raises:
        msgspec.DecodeError: the line is not an event of this schema.
    """
    return _decoder.decode(line)


def number(value: float) -> Number:
    """``value``, as text where JSON has no number for it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def numbers(values: list[float]) -> list[Number]:
    """``number`` of every element."""
    return [number(value) for value in values]


def nested_numbers(values: list[list[float]]) -> list[list[Number]]:
    """``number`` of every element of every row."""
    return [numbers(row) for row in values]


def to_floats(values: Iterable[Number]) -> list[float]:
    """The floats that ``numbers`` wrote."""
    return [float(value) for value in values]
