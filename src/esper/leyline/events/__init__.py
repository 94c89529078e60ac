"""The events of a run: one typed schema, one line of JSON per event.

A float that is not finite is written as the string ``NaN``, ``Infinity`` or ``-Infinity``, never as
null; null means missing. Fields that a newer schema adds have defaults, so lines of an older schema
can still be read. One event holds the values of all environments in lists, so a step takes one
line. ``scripts/write_event_docs.py`` generates docs/events.md from this package.
"""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, Union, get_origin

import msgspec

SCHEMA_VERSION = 4
"""Schema 4 added the test scores of EPISODE_OUTCOME. Schema 3 added EPISODE_STARTED,
DECISIONS_MADE, ANOMALY_DETECTED, TELEMETRY_DROPPED, GYM_EPISODES and UPDATE_REFUSED, and all other
fields that have a default."""

POINTS = 100.0
"""Points per unit of utility or accuracy: gains are in points."""

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


class TrainingStarted(Event, tag="TRAINING_STARTED"):
    """A process started training."""

    schema: int
    """Version of the event schema."""
    round: int
    """Rounds completed before the process started; above 0 if the run was resumed."""
    rounds: int
    """Total number of rounds."""
    tasks: list[str]
    """Names of the tasks that are trained; a family counts as one task."""
    policy: str
    """The policy: ppo, impala, heuristic, random, schedule or never; imitation or offline if it
    learns from records, in epochs instead of rounds."""
    envs: int
    """Number of environments, not counting twins; 0 for a run that learns from records."""
    group_size: int
    """Number of environments that share a never-grow twin."""
    episode_length: int
    """Environment steps per round."""
    slots: list[list[str]]
    """Names of the host's slots, one list per task; empty for a run that learns from records."""
    host_parameters: list[int]
    """Parameters of the host without seeds, one value per task; empty for a run that learns from
    records."""
    device: str
    """The devices, separated by spaces, such as cpu or cuda:0 cuda:1."""
    amp_enabled: bool
    """Whether hosts run in mixed precision."""
    amp_dtype: str | None = None
    """The type of mixed precision, bfloat16 or float16; null without mixed precision."""
    blueprints: list[str] = msgspec.field(default_factory=list)
    """Names of the blueprints by number. Empty before schema 3, when all were built in."""
    gym: str | None = None
    """Id of the Gymnasium environment, if the run trains on one. Rounds then have a fixed length,
    and episodes may end within a round."""
    level: str | None = None
    """Telemetry level, which determines the events that are written."""
    split_seed: int | None = None
    """Seed of the splits that are drawn; null for a Gymnasium task and in older runs."""
    amp_policy_dtype: str | None = None
    """The type of half precision of the policy's encoder and LSTM; null if they run in float32."""
    schedules: dict[str, str | float | None] = msgspec.field(default_factory=dict)
    """The settings of the schedules of learning rate, clip range, entropy and value weight."""


class EpisodeStarted(RoundEvent, tag="EPISODE_STARTED"):
    """A round started with new hosts. All lists have one value per environment."""

    task: list[str]
    """Task or family that the environment trains on in this round."""
    host_parameters: list[int]
    """Parameters of its host without seeds."""
    draw: list[str] = msgspec.field(default_factory=list)
    """Name of the drawn task, such as adaptation:17; empty if no task belongs to a family."""


class DecisionsMade(StepEvent, tag="DECISIONS_MADE"):
    """Legal operations and chosen actions in a step. All lists have one value per environment."""

    actions: list[list[int]]
    """Option chosen by each head, in the order of ``leyline.actions.HEADS``."""
    legal_ops: list[list[int]]
    """The operations that were legal."""
    op_probability: list[list[Number]]
    """Probability of each operation; empty for a policy without probabilities."""
    log_prob: list[Number]
    """Log-probability of the whole action."""
    value: list[Number]
    """Value predicted by the critic, in units of the normalised return."""


class EpochCompleted(StepEvent, tag="EPOCH_COMPLETED"):
    """One environment step. All lists have one value or one list of slots per environment."""

    train_loss: list[Number]
    """Mean training loss of the step; NaN if the host was rolled back."""
    train_accuracy: list[Number]
    """Training accuracy in [0, 1]; NaN if the host was rolled back."""
    validation_loss: list[Number]
    """Validation loss of the host with its seeds."""
    validation_accuracy: list[Number]
    """Validation accuracy of the host with its seeds, in [0, 1]."""
    expected_accuracy: list[Number]
    """Mean probability of the true class on the validation data."""
    twin_validation_accuracy: list[Number]
    """Validation accuracy of the never-grow twin."""
    twin_expected_accuracy: list[Number]
    """Expected accuracy of the never-grow twin."""
    reward: list[Number]
    """Reward of this step."""
    added_parameters: list[int]
    """Parameters that the utility charges its price for."""
    op: list[int]
    """The requested operation, ``leyline.actions.Op``."""
    slot: list[int]
    """Index of the slot that the action names."""
    success: list[bool]
    """Whether the action was legal."""
    stage: list[list[int]]
    """``leyline.stages.Stage`` of each slot; 0 for a slot that the host does not have."""
    blueprint: list[list[int]]
    """Number of the blueprint in each slot; 0 in an empty slot."""
    alpha: list[list[Number]]
    """Alpha of each seed: how far it is blended in, in [0, 1]."""


class SeedContributions(StepEvent, tag="SEED_CONTRIBUTIONS"):
    """What the seeds that act contribute, in every fourth step. The lists are parallel."""

    environment: list[int]
    """Index of the environment."""
    slot: list[int]
    """Index of the slot, from 0."""
    contribution: list[Number]
    """Expected accuracy with the seed minus without it, rounded to 0.0001."""


class SeedSignalsMeasured(StepEvent, tag="SEED_SIGNALS_MEASURED"):
    """Signals measured for every seed, ``[environment][slot]``."""

    contribution: list[list[Number]]
    """Expected accuracy with the seed minus without it; NaN if no seed acts in the slot."""
    gradient_norm: list[list[Number]]
    """Gradient norm of the seed's parameters."""
    gradient_health: list[list[Number]]
    """Gradient health in [0, 1], see ``tolaria.results``."""


class SeedEvent(StepEvent):
    """An event that is the same for several seeds in one step. The lists are parallel."""

    environment: list[int]
    """Index of the environment."""
    slot: list[int]
    """Index of the slot, from 0."""
    blueprint: list[str]
    """Name of the seed's blueprint."""


class SeedGerminated(SeedEvent, tag="SEED_GERMINATED"):
    """Seeds germinated. The lists are parallel."""


class SeedStageChanged(SeedEvent, tag="SEED_STAGE_CHANGED"):
    """Slots changed stage. The lists are parallel."""

    previous: list[str]
    """Previous stage."""
    stage: list[str]
    """New stage."""


class SeedFossilized(SeedEvent, tag="SEED_FOSSILIZED"):
    """Seeds fossilised. The lists are parallel."""

    parameters: list[int]
    """Number of parameters of each seed."""


class SeedPruned(SeedEvent, tag="SEED_PRUNED"):
    """Seeds were pruned. The lists are parallel."""


class GovernorRollback(StepEvent, tag="GOVERNOR_ROLLBACK"):
    """Diverged hosts were rolled back to their snapshots. The lists are parallel."""

    environment: list[int]
    """Index of the environment."""
    reason: list[str]
    """Reason for the rollback: NOT_FINITE, COLLAPSE or RUNAWAY."""


class EpisodeOutcome(RoundEvent, tag="EPISODE_OUTCOME"):
    """Outcome of the episodes of a round. All lists have one value per environment.

    All scores are committed: with only the fossilised seeds. Fields whose names begin with `test_`
    or `twin_test_` are on the test split, which is measured once, after the last step; the other
    scores are on the validation split, from which observations and rewards are computed. The gain
    of an episode is `100 (test_utility - twin_test_utility)` points.
    """

    task: list[str]
    """Task or family that the environment trained on."""
    utility: list[Number]
    """Utility on the validation split at the last step."""
    twin_utility: list[Number]
    """Validation utility of the never-grow twin."""
    accuracy: list[Number]
    """Validation accuracy, in [0, 1]."""
    twin_accuracy: list[Number]
    """Validation accuracy of the twin."""
    expected_accuracy: list[Number]
    """Mean probability of the true class on the validation split."""
    twin_expected_accuracy: list[Number]
    """Expected validation accuracy of the twin."""
    episode_return: list[Number]
    """Sum of the rewards of the episode."""
    added_parameters: list[int]
    """Parameters of the fossilised seeds."""
    germinated: list[int]
    """Number of seeds that germinated."""
    fossilised: list[int]
    """Number of seeds that fossilised."""
    pruned: list[int]
    """Number of seeds that were pruned."""
    rolled_back: list[int]
    """Number of times the governor rolled the host back."""
    test_accuracy: list[Number] = msgspec.field(default_factory=list)
    """Test accuracy, in [0, 1]. Like all test scores, empty before schema 4."""
    twin_test_accuracy: list[Number] = msgspec.field(default_factory=list)
    """Test accuracy of the twin."""
    test_expected_accuracy: list[Number] = msgspec.field(default_factory=list)
    """Mean probability of the true class on the test split."""
    twin_test_expected_accuracy: list[Number] = msgspec.field(default_factory=list)
    """Expected test accuracy of the twin."""
    test_utility: list[Number] = msgspec.field(default_factory=list)
    """Utility on the test split: expected test accuracy minus the price of
    added parameters."""
    twin_test_utility: list[Number] = msgspec.field(default_factory=list)
    """Test utility of the twin, which pays no price: its expected test accuracy."""

    @property
    def gain(self) -> list[float]:
        """Test utility minus the twin's, in points; empty before schema 4."""
        return _points(self.test_utility, self.twin_test_utility)

    @property
    def validation_gain(self) -> list[float]:
        """Validation utility minus the twin's, in points."""
        return _points(self.utility, self.twin_utility)


def _points(scores: list[Number], twin: list[Number]) -> list[float]:
    pairs = zip(to_floats(scores), to_floats(twin), strict=False)
    return [POINTS * (grown - never) for grown, never in pairs]


class CounterfactualMatrixComputed(RoundEvent, tag="COUNTERFACTUAL_MATRIX_COMPUTED"):
    """Contribution of each seed at the end of the episode, in expected accuracy; NaN for slots
    whose seed did not act."""

    shapley: list[list[Number]]
    """Shapley value of each seed, ``[environment][slot]``; all NaN with more than 4 slots."""
    interactions: list[list[list[Number]]]
    """Interaction of each pair of seeds, ``[environment][slot][slot]``: the contribution of both
    minus those of each alone."""


class GymEpisodes(RoundEvent, tag="GYM_EPISODES"):
    """Episodes of a Gymnasium task that ended in a round. The lists are parallel."""

    environment: list[int]
    """Index of the environment."""
    episode_return: list[Number]
    """Sum of the rewards of the environment, not normalised."""
    length: list[int]
    """Steps of the episode."""
    terminated: list[bool]
    """Whether the episode terminated; false if it was truncated."""


class GymEvaluation(RoundEvent, tag="GYM_EVALUATION"):
    """Fresh episodes of a Gymnasium task with the most probable actions, after the update."""

    episodes: int
    """Number of episodes."""
    episode_return: Number
    """Mean return of the episodes."""
    best: bool
    """Whether no earlier evaluation was better; its checkpoint is kept."""


class PPOUpdateCompleted(RoundEvent, tag="PPO_UPDATE_COMPLETED"):
    """One update of the policy by PPO.

    Earlier versions also wrote it for other algorithms, which have POLICY_UPDATE_COMPLETED now.
    """

    update: int
    """Number of the update, from 1."""
    metrics: dict[str, Number | None]
    """The metrics by the names below. null means that there was nothing to measure: a head without
    a gradient has no norm, which differs from a norm of NaN."""


class PolicyUpdateCompleted(PPOUpdateCompleted, tag="POLICY_UPDATE_COMPLETED"):
    """One update by another algorithm than PPO, or one epoch of learning from records.

    Who asks for PPO_UPDATE_COMPLETED in Python is given these too.
    """


class UpdateRefused(RoundEvent, tag="UPDATE_REFUSED"):
    """An update produced a number that is not finite, so it left the weights unchanged."""

    tensor: str
    """Name of the first tensor with such a number."""
    file: str
    """File that replays the update, relative to the run directory; empty if it was not written."""
    in_a_row: int
    """Number of consecutive updates that were refused."""
    amp_dtype: str | None = None
    """The type of the hosts' mixed precision; null if they ran in float32."""
    amp_policy_dtype: str | None = None
    """The type of half precision of the policy's encoder and LSTM; null if they run in float32."""


class AnalyticsSnapshot(RoundEvent, tag="ANALYTICS_SNAPSHOT"):
    """Throughput and precision of a round."""

    amp_enabled: bool
    """Whether hosts run in mixed precision."""
    amp_dtype: str | None
    """The type of mixed precision, if used."""
    learning_rate: float | None
    """Learning rate of the policy's optimizer."""
    environment_steps_per_second: float
    """Steps per second of all environments together, including the time of the update."""
    rollout_seconds: float
    """Wall time of the episodes, in seconds."""
    update_seconds: float
    """Wall time of the update, in seconds."""
    amp_scale: float | None = None
    """Smallest loss scale of the hosts, if the type requires one."""
    learning_rates: dict[str, float] = msgspec.field(default_factory=dict)
    """Learning rate of each parameter group, by name."""
    amp_policy: bool = False
    """Whether the policy's encoder and LSTM run in half precision."""
    amp_policy_scale: float | None = None
    """Loss scale of the policy, if it uses one."""
    amp_policy_dtype: str | None = None
    """The type of half precision of the policy's encoder and LSTM; null if they run in float32."""


class AnomalyDetected(RoundEvent, tag="ANOMALY_DETECTED"):
    """A metric crossed a threshold in this round. The next report follows only after the metric has
    recovered."""

    kind: str
    """Kind of anomaly, see the table of anomalies."""
    message: str
    """Description of what happened."""
    step: int | None = None
    """The environment step, if the anomaly belongs to one."""
    metric: str | None = None
    """The metric that shows the anomaly."""
    value: Number | None = None
    """The measured value; null if the anomaly is that the value is missing."""
    threshold: Number | None = None
    """The threshold that was crossed."""
    amp_enabled: bool = False
    """Whether hosts ran in mixed precision."""
    amp_dtype: str | None = None
    """The type of mixed precision, if used."""
    amp_scale: float | None = None
    """Loss scale, if the type requires one."""
    amp_policy_dtype: str | None = None
    """The type of half precision of the policy's encoder and LSTM; null if they run in float32."""
    amp_policy_scale: float | None = None
    """Loss scale of the policy, if it uses one."""


class TelemetryDropped(RoundEvent, tag="TELEMETRY_DROPPED"):
    """Steps whose events were dropped because the sinks could not keep up or the events could not
    be made."""

    steps: int
    """Number of steps dropped since the previous event of this type."""
    total: int
    """Number of steps dropped since the process started."""


class CheckpointSaved(RoundEvent, tag="CHECKPOINT_SAVED"):
    """A checkpoint of the round was written to disk."""

    path: str
    """Path of the checkpoint, relative to the run directory."""


class TrainingFinished(RoundEvent, tag="TRAINING_FINISHED"):
    """The process ended."""

    status: str
    """Outcome: finished, interrupted or failed."""
    message: str | None = None
    """The exception, if one ended the process."""


class GrowthStarted(Event, tag="GROWTH_STARTED"):
    """``esper.grow`` began to train a module of the user's own, or goes on after it was stopped."""

    schema: int
    """Version of the event schema."""
    model: str
    """Class of the module."""
    policy: str
    """What decides about growth: widen, rule, the name of a trained policy or a class."""
    epochs: int
    """Epochs of training."""
    tries: int
    """Times that the module is trained."""
    price: float
    """Validation score that growth by a factor of e must gain to pay."""
    parameters: int
    """Parameters of the module before it grows."""


class GrowthEpochCompleted(Event, tag="GROWTH_EPOCH_COMPLETED"):
    """An epoch of ``esper.grow``. Of one that was repeated after a kill, the last event counts."""

    variant: str
    """grown, or twin for the copy that never grows."""
    attempt: int
    """Number of the try, from 1."""
    epoch: int
    """Number of the epoch, from 1."""
    unit: str
    """What the figure is: accuracy, R², loss, metric or score."""
    figure: Number
    """Validation in the user's own unit; an accuracy is a share."""
    loss: Number
    """Validation loss."""
    train_loss: Number | None
    """Mean training loss; null if it is not known."""
    parameters: int
    """Parameters of the module and of all its seeds."""
    stages: dict[str, str]
    """Stage of each slot, by the name of the module behind which its seed is; empty for widen."""
    actions: list[str]
    """What was decided after the epoch, with the evidence, one line each."""


class GrowthFinished(Event, tag="GROWTH_FINISHED"):
    """``esper.grow`` ended. All lists have one value for the grown module, and a second one for the
    twin if there was one."""

    unit: str
    """See ``GROWTH_EPOCH_COMPLETED``."""
    validation: list[Number]
    """Validation in that unit."""
    parameters: list[int]
    """Parameters."""
    seconds: list[float]
    """Wall time of the training."""
    paid: bool | None
    """Whether growth gained more than its price on validation; null without a twin."""
    verdict: str
    """The sentence that says so, with the interval, as printed."""
    grew: dict[str, str]
    """By the name of each module that grew its sizes before and after, or its seed's blueprint."""
    test: list[Number] = msgspec.field(default_factory=list)
    """The same as ``validation`` on the test split; empty without one."""


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
    GymEvaluation: "minimal",
    PPOUpdateCompleted: "minimal",
    PolicyUpdateCompleted: "minimal",
    UpdateRefused: "minimal",
    AnalyticsSnapshot: "minimal",
    AnomalyDetected: "minimal",
    TelemetryDropped: "minimal",
    CheckpointSaved: "minimal",
    TrainingFinished: "minimal",
    GrowthStarted: "minimal",
    GrowthEpochCompleted: "minimal",
    GrowthFinished: "minimal",
}
"""The lowest telemetry level that writes each kind of event, in the order of docs/events.md."""

LEVELS: dict[str, tuple[type[Event], ...]] = {
    level: tuple(kind for kind, least in _LEAST.items() if least in _LEVELS[: rank + 1])
    for rank, level in enumerate(_LEVELS)
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


def try_decode(line: bytes) -> Event | None:
    """The event of a line; None if the line is truncated, corrupt or of a newer schema."""
    try:
        event: Event = decode(line.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if _lists_agree(event) else None


def _lists_agree(event: Event) -> bool:
    """Whether the lists of an event have one entry for each of the same things.

    A list with a default may be empty, as in events of an older schema, and so may those of a run
    that has no hosts.
    """
    required, optional = _lists_of(type(event))
    lengths = {len(getattr(event, name)) for name in required}
    lengths |= {len(entries) for name in optional if (entries := getattr(event, name))}
    return len(lengths) <= 1


@cache
def _lists_of(kind: type[Event]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parallel lists of a kind of event: those that are full, and those that may be empty."""
    names: tuple[list[str], list[str]] = [], []
    for field in msgspec.structs.fields(kind):
        # The blueprints of a run are listed beside its tasks.
        if get_origin(field.type) is list and field.name != "blueprints":
            names[kind is TrainingStarted or not field.required].append(field.name)
    return tuple(names[0]), tuple(names[1])
