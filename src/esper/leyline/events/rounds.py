"""Events of a run, its rounds and its updates."""

import msgspec

from esper.leyline.events.event import Event, Number, RoundEvent


class TrainingStarted(Event, tag="TRAINING_STARTED"):
    """A process began to train."""

    schema: int
    """Version of the event schema."""
    round: int
    """Rounds that were done before; above 0 where a run was resumed."""
    rounds: int
    """Rounds in total."""
    tasks: list[str]
    """What is trained."""
    policy: str
    """ppo, heuristic, random or never."""
    envs: int
    """Environments, twins not counted."""
    group_size: int
    """Environments that share a never-grow twin."""
    episode_length: int
    """Environment steps of a round."""
    slots: list[list[str]]
    """Names of the host's slots, a list each task."""
    host_parameters: list[int]
    """Parameters of the host alone, one a task."""
    device: str
    """cpu, or cuda:0 and so on."""
    amp_enabled: bool
    """Whether hosts run in mixed precision."""
    amp_dtype: str | None = None
    """The type they run in then, bfloat16 or float16."""
    blueprints: list[str] = msgspec.field(default_factory=list)
    """Names of the blueprints by their number; empty before schema 3, then those of Esper."""
    gym: str | None = None
    """The Gymnasium environment where it is one that is learned; a round is then of fixed length
    and episodes end within it."""
    level: str | None = None
    """Telemetry level, so that a reader can tell what is not written from what did not happen."""


class EpisodeStarted(RoundEvent, tag="EPISODE_STARTED"):
    """A round began with fresh hosts; one value an environment."""

    task: list[str]
    """What the environment trains in this round."""
    host_parameters: list[int]
    """Parameters of its host alone."""


class EpisodeOutcome(RoundEvent, tag="EPISODE_OUTCOME"):
    """A round's episodes, one value an environment.

    Accuracy is committed: validation accuracy with fossilised seeds alone.
    """

    task: list[str]
    """What the environment trained."""
    utility: list[Number]
    """Utility of the last step."""
    twin_utility: list[Number]
    """The same of the never-grow twin."""
    accuracy: list[Number]
    """Validation accuracy, in [0, 1]."""
    twin_accuracy: list[Number]
    """The same of the twin."""
    expected_accuracy: list[Number]
    """Mean probability of the true class."""
    twin_expected_accuracy: list[Number]
    """The same of the twin."""
    episode_return: list[Number]
    """Sum of the rewards."""
    added_parameters: list[int]
    """Parameters of the fossilised seeds."""
    germinated: list[int]
    """Seeds that were born."""
    fossilised: list[int]
    """Seeds that were kept."""
    pruned: list[int]
    """Seeds that were removed."""
    rolled_back: list[int]
    """How often the governor put the host back."""


class CounterfactualMatrixComputed(RoundEvent, tag="COUNTERFACTUAL_MATRIX_COMPUTED"):
    """What each seed was worth at the end of an episode, in expected accuracy; NaN where no seed
    acted."""

    shapley: list[list[Number]]
    """Shapley value, ``[environment][slot]``."""
    interactions: list[list[list[Number]]]
    """Interaction of each pair, ``[environment][slot][slot]``."""


class GymEpisodes(RoundEvent, tag="GYM_EPISODES"):
    """Episodes of a Gymnasium task that ended in a round; the lists are parallel."""

    environment: list[int]
    """Which environment."""
    episode_return: list[Number]
    """Sum of the rewards as the environment paid them."""
    length: list[int]
    """Steps of the episode."""
    terminated: list[bool]
    """False where it was cut off."""


class PPOUpdateCompleted(RoundEvent, tag="PPO_UPDATE_COMPLETED"):
    """One update of the policy."""

    update: int
    """Its number, from 1."""
    metrics: dict[str, Number | None]
    """What was measured, by the names below. null means that there was nothing to measure: a head
    without a gradient has no norm, which is not the same as a norm that is NaN."""


class UpdateRefused(RoundEvent, tag="UPDATE_REFUSED"):
    """An update met a number that is not finite and left the weights as they were."""

    tensor: str
    """The first tensor that held one."""
    file: str
    """What replays it, from the run directory."""
    in_a_row: int
    """Updates in a row to which it happened."""


class AnalyticsSnapshot(RoundEvent, tag="ANALYTICS_SNAPSHOT"):
    """Throughput and precision of a round."""

    amp_enabled: bool
    """Whether hosts run in mixed precision."""
    amp_dtype: str | None
    """The type they run in then."""
    learning_rate: float | None
    """Step size of the policy's optimizer."""
    environment_steps_per_second: float
    """Steps of all environments, update included."""
    rollout_seconds: float
    """Wall time of the episodes."""
    update_seconds: float
    """Wall time of the update."""
    amp_scale: float | None = None
    """Least loss scale of the hosts, where the type needs one."""
    learning_rates: dict[str, float] = msgspec.field(default_factory=dict)
    """Step size of each parameter group, by its name."""
    amp_policy: bool = False
    """Whether the policy's trunk runs in half precision too."""
    amp_policy_scale: float | None = None
    """The policy's loss scale, where it needs one."""


class AnomalyDetected(RoundEvent, tag="ANOMALY_DETECTED"):
    """Something went out of its bounds in this round; one event until it is back."""

    kind: str
    """Which bound, see the table of anomalies."""
    message: str
    """What happened, for people."""
    step: int | None = None
    """The environment step, where it belongs to one."""
    metric: str | None = None
    """The metric that shows it."""
    value: Number | None = None
    """What was measured; null where the anomaly is that there is nothing."""
    threshold: Number | None = None
    """The bound."""
    amp_enabled: bool = False
    """Whether hosts ran in mixed precision."""
    amp_dtype: str | None = None
    """The type they ran in then."""
    amp_scale: float | None = None
    """Loss scale, where the type needs one."""


class TelemetryDropped(RoundEvent, tag="TELEMETRY_DROPPED"):
    """Steps without events, because the sinks could not keep up."""

    steps: int
    """How many since the last such event."""
    total: int
    """How many in this process."""


class CheckpointSaved(RoundEvent, tag="CHECKPOINT_SAVED"):
    """A round is safe on disk."""

    path: str
    """Where, from the run directory."""


class TrainingFinished(RoundEvent, tag="TRAINING_FINISHED"):
    """The process ended."""

    status: str
    """finished, interrupted or failed."""
    message: str | None = None
    """Why it failed."""
