"""Everything one can set about a run, as frozen dataclasses; command line and JSON derive from it.

Each field has one long flag of the same name. ``ALIASES`` are the other spellings in use.
"""

import dataclasses
import os
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from esper.leyline.errors import UsageError

ALIASES: dict[str, tuple[str, ...]] = {
    "rounds": ("episodes", "n_episodes"),
    "envs": ("n_envs",),
    "episode_length": ("max_epochs",),
    "use_amp": ("amp",),
    "learning_rate": ("lr",),
    "entropy": ("entropy_coef",),
    "clip": ("clip_ratio",),
    "trace_decay": ("gae_lambda",),
    "discount": ("gamma",),
    "lstm_hidden": ("lstm_hidden_dim",),
    "ppo_epochs": ("recurrent_n_epochs",),
    "reward": ("reward_mode",),
}
"""Other spellings of a field, in the command line and in JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldConfig:
    """What is trained, and for how long."""

    task: tuple[str, ...] = ("digits_shift",)
    """What the hosts learn: one or more tasks, or a suite; `esper tasks` lists them. Each group of
    environments draws one of them for every episode."""
    plugin: tuple[str, ...] = ()
    """Python files with tasks and blueprints of your own."""
    data_dir: str = "./data"
    """Directory with the files of tasks that read any: cifar-10-batches-bin or -py in it."""
    text_file: str | None = None
    """Text whose bytes the tasks on text learn; the licence and documentation of Esper when not
    given."""
    slots: tuple[str, ...] = ()
    """Where seeds may grow: names such as r0c0, or early, mid, late; all slots when not given."""
    max_seeds: int | None = None
    """Most living seeds an environment may have; as many as it has slots when not given."""
    rounds: int = 30
    """Rounds in total; each is one episode of every environment and one PPO update (also
    --episodes)."""
    envs: int = 32
    """Environments that train at once, twins not counted (also --n-envs)."""
    group_size: int = 8
    """Environments that share initial host, data and one never-grow twin."""
    episode_length: int | None = None
    """Environment steps of an episode, each an epoch of the host; the task's own when not given
    (also --max-epochs)."""
    max_batches: int | None = None
    """Minibatches of an environment step; the task's own when not given."""
    batch_size: int | None = None
    """Images of a minibatch; the task's own when not given."""
    reward: Literal["terminal", "paired", "utility", "shaped", "simplified", "basic", "sparse"] = (
        "paired"
    )
    """What is paid for: the final utility, on the last step (terminal) or step by step against the
    twin (paired); utility in every step; or one of the prior system's modes. See docs/rewards.md.
    """
    stage_shaping: float = 0.0
    """Weight of the stages' potential in the reward; it changes no optimal policy."""
    rollback_penalty: float = 1.0
    """Taken from the reward of a step in which the governor rolls a host back."""
    strict_gates: bool = False
    """Whether seeds must also have improved something to pass a gate."""
    one_at_a_time: bool = True
    """Whether a seed may germinate only while no other seed develops."""
    seed: int = 42
    """Root of every random number, in [0, 2^32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GymConfig:
    """A Gymnasium task in the place of networks that grow (docs/gymnasium.md)."""

    gym: str | None = None
    """Id of the environment, such as CartPole-v1, or module:id. Settings of growing networks are
    refused with it, and others have defaults of their own."""
    gym_args: tuple[str, ...] = ()
    """Arguments of the environment, each NAME=VALUE with the value as in JSON: length=32."""
    rollout_steps: int = 128
    """Steps of each environment between two updates; a round has this many."""
    memory: Literal["lstm", "none"] = "lstm"
    """What the policy remembers with; without memory it sees the present alone."""
    critic: Literal["shared", "separate"] = "shared"
    """Whether the critic shares the actor's encoder and memory, or has its own, which costs twice
    as much."""
    normalise_observations: bool = True
    """Whether features of a Box are shifted and scaled by running moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How the policy learns (PPO)."""

    learning_rate: float = 1e-3
    """Step size of Adam, for policy and critic (also --lr)."""
    value_learning_rate: float | None = None
    """Step size for the critic's own layers; as for the policy when not given. The schedule below
    is that of both."""
    lr_warmup_frac: float = 0.0
    """Share of the decay's steps over which step sizes rise linearly."""
    lr_warmup_steps: int = 0
    """The same as a number of updates; give one of the two."""
    lr_decay: Literal["none", "linear", "cosine", "step"] = "none"
    """How step sizes fall after the warmup. ESPER_DISABLE_LR_SCHEDULE=1 keeps them constant."""
    lr_decay_steps: int = 30
    """Update from which their end value holds, counted from the start of the run; it does not
    follow --rounds, so that a run that goes on later keeps its schedule."""
    lr_end_factor: float = 0.1
    """Their end value as a share of the step size."""
    lr_step_size: int = 10
    """Updates of a stair of --lr-decay step."""
    lr_adaptive_kl: float | None = None
    """Approximate KL in nats that an update should have: step sizes follow it. Not with
    --lr-decay."""
    ppo_epochs: int = 4
    """Passes over each round's episodes."""
    minibatches: int = 4
    """Parts of a pass, each a set of whole episodes."""
    clip: float = 0.2
    """Trust region of the importance ratio, 1 plus or minus this."""
    clip_decay: Literal["none", "linear", "cosine", "step"] = "none"
    """How the clip falls; clip_decay_steps, clip_end_factor and clip_step_size are as for the step
    size."""
    clip_decay_steps: int = 30
    """Update from which its end value holds."""
    clip_end_factor: float = 0.1
    """Its end value as a share of the clip."""
    clip_step_size: int = 10
    """Updates of a stair of --clip-decay step."""
    discount: float = 1.0
    """Gamma, a factor a step."""
    trace_decay: float = 0.95
    """Lambda of generalised advantage estimation."""
    entropy: float = 0.01
    """Weight of the entropy bonus, reward a nat."""
    entropy_decay: Literal["none", "linear", "cosine", "step"] = "none"
    """How the entropy weight falls; entropy_decay_steps, entropy_end_factor and entropy_step_size
    are as for the step size."""
    entropy_decay_steps: int = 30
    """Update from which its end value holds."""
    entropy_end_factor: float = 0.1
    """Its end value as a share of the entropy weight."""
    entropy_step_size: int = 10
    """Updates of a stair of --entropy-decay step."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    max_gradient_norm: float = 0.5
    """Norm at which the policy's gradient is clipped."""
    target_kl: float = 0.05
    """A round stops learning once approximate KL, in nats, is above 1.5 times this."""
    lstm_hidden: int = 128
    """Width of the LSTM."""
    amp_policy: bool = False
    """Compute the policy's encoder and LSTM in half precision, when acting and when
    learning; heads, log-probs and losses stay in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineConfig:
    """Where it runs, and in which precision."""

    device: str = "cpu"
    """cpu, or cuda:0 and so on: where the policy is, and everything else unless hosts are dealt."""
    devices: tuple[str, ...] = ("cpu",)
    """Devices over which the hosts are dealt, such as cuda:0 cuda:1; the policy decides for all on
    the first. See docs/devices.md."""
    gpu_preload: bool | None = None
    """Whether training data live on a CUDA device (--gpu-preload) or in page-locked memory of the
    host, from where each minibatch is copied (--no-gpu-preload); small data live on the device when
    not given. On a CPU they are where they are."""
    experimental_gpu_preload_gather: bool = False
    """Pick minibatches on the device: what --gpu-preload does anyway, and implied by this."""
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune"] = "auto"
    """Compile what surrounds the policy's LSTM, in one of torch.compile's modes; auto does it on
    CUDA, where steps are captured as CUDA graphs too, and not on a CPU, where it was slower."""
    threads: int | None = None
    """CPU threads; the environments are dealt over them. As torch chooses when not given."""
    backend: Literal["auto", "torch", "native"] = "auto"
    """What computes the hosts: native (C++, on a CPU, compiled once on first use), torch
    (everywhere), or auto, which is native wherever that can be had."""
    use_amp: bool = False
    """Mixed precision for the hosts (also --amp): on CUDA, and on a CPU with --backend torch.
    ESPER_DISABLE_AMP=1 forbids it."""
    amp_dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """In which of the two --use-amp computes: bfloat16, float16 with scaled losses, or auto, which
    is bfloat16 where the device has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """What is written, and where."""

    telemetry_dir: str = "./runs"
    """Directory in which the run's own directory is made."""
    telemetry_level: Literal["off", "minimal", "normal", "debug"] = "normal"
    """How much is written, never what is computed: off (no events), minimal (a few lines a
    round), normal (every step), debug (every seed's signals)."""
    tensorboard: bool = False
    """Whether to write curves for TensorBoard, into the run directory; needs the extra
    `trackers`."""
    wandb: bool = False
    """Whether to write an offline run for Weights & Biases, into the run directory; needs the
    extra `trackers`."""
    checkpoint_every: int = 1
    """Rounds between checkpoints; the last round always has one."""
    keep_checkpoints: int = 3
    """How many of the latest checkpoints stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of a run."""

    world: WorldConfig = field(default_factory=WorldConfig)
    gymnasium: GymConfig = field(default_factory=GymConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)


GROWTH_ONLY = frozenset(
    {
        "task",
        "data_dir",
        "gpu_preload",
        "experimental_gpu_preload_gather",
        "text_file",
        "slots",
        "max_seeds",
        "group_size",
        "episode_length",
        "max_batches",
        "batch_size",
        "reward",
        "stage_shaping",
        "rollback_penalty",
        "strict_gates",
        "one_at_a_time",
        "backend",
        "use_amp",
    }
)
"""Settings that a Gymnasium task does not have."""

GYM_ONLY = frozenset(f.name for f in dataclasses.fields(GymConfig)) - {"gym"}
"""Settings that only a Gymnasium task has."""

GYM_DEFAULTS: dict[str, Any] = {
    "rounds": 100,
    "envs": 8,
    "learning_rate": 1.5e-3,
    "ppo_epochs": 10,
    "discount": 0.99,
    "trace_decay": 0.98,
    "entropy": 0.0,
    "lstm_hidden": 64,
}
"""Defaults of a Gymnasium task where they differ from those of growing networks."""


def flatten(config: TrainConfig) -> dict[str, Any]:
    """The settings that the run has as one flat dictionary, tuples as lists, ready for JSON."""
    flat: dict[str, Any] = {}
    for group in dataclasses.fields(config):
        flat.update(dataclasses.asdict(getattr(config, group.name)))
    absent = GYM_ONLY | {"gym"} if config.gymnasium.gym is None else GROWTH_ONLY
    return {
        name: list(v) if isinstance(v, tuple) else v
        for name, v in flat.items()
        if name not in absent
    }


def unflatten(settings: dict[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """The configuration with ``settings``, a flat dictionary in which aliases may be used.

    Args:
        settings: what was given.
        base: where the others come from; the defaults of the kind of run when None.

    Raises:
        UsageError: an unknown key, a wrong type, two values for one setting, or one that belongs
            to another kind of run.
    """
    given = canonical(settings)
    if base is None:
        base = TrainConfig()
        if given.get("gym") is not None:
            base = _with(base, {"gym": given["gym"], **GYM_DEFAULTS})
    complete = _with(base, given)
    _check_kind(given, base.gymnasium.gym, complete.gymnasium.gym)
    return complete


def canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` by the names of the fields, lists as tuples.

    Raises:
        UsageError: an unknown key, a wrong type, or two values for one setting.
    """
    given: dict[str, Any] = {}
    kinds = setting_kinds()
    for key, value in settings.items():
        name = canonical_name(key)
        if name in given and given[name] != value:
            raise UsageError(f"{key}: {name} is already given another value; keep one of them")
        given[name] = value
    return _with_devices({name: _typed(name, value, kinds[name]) for name, value in given.items()})


def _with_devices(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with ``device`` and ``devices`` where it has one of them: they say the same."""
    if "devices" in given:
        devices = given["devices"]
        if not devices:
            raise UsageError("devices: no device is given; name one or more, such as cpu or cuda:0")
        if given.get("device", devices[0]) != devices[0]:
            raise UsageError(
                f"device: {shown(given['device'])} and devices {shown(' '.join(devices))} "
                "contradict each other; give one of them"
            )
        return given | {"device": devices[0]}
    return given | {"devices": (given["device"],)} if "device" in given else given


def _with(base: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    groups = {}
    for group in dataclasses.fields(TrainConfig):
        part = getattr(base, group.name)
        own = {f.name: given[f.name] for f in dataclasses.fields(part) if f.name in given}
        groups[group.name] = dataclasses.replace(part, **own)
    return TrainConfig(**groups)


def _check_kind(given: dict[str, Any], before: str | None, gym: str | None) -> None:
    """Refuse settings of growing networks for a Gymnasium task, and the other way round."""
    if (before is None) != (gym is None):
        raise UsageError(
            f"gym: {shown(gym)} is another kind of run than these settings are of; "
            "give it to esper train ppo, and for a new run"
        )
    for name in given:
        if gym is not None and name in GROWTH_ONLY:
            raise UsageError(f"{name}: belongs to growing networks, not to --gym; leave it out")
        if gym is None and name in GYM_ONLY:
            raise UsageError(f"{name}: belongs to a Gymnasium task; give --gym ID, or leave it out")


def setting_names() -> list[str]:
    """Every setting, aliases not included."""
    return list(setting_kinds())


def setting_kinds() -> dict[str, Any]:
    """The type of every setting, by name."""
    groups: list[Any] = [group.type for group in dataclasses.fields(TrainConfig)]
    return {f.name: f.type for group in groups for f in dataclasses.fields(group)}


def canonical_name(key: str) -> str:
    """The setting that ``key`` names.

    Raises:
        UsageError: there is no such setting; suggests the nearest.
    """
    name = key.replace("-", "_")
    names = setting_names()
    if name in names:
        return name
    for original, others in ALIASES.items():
        if name in others:
            return original
    known = names + [alias for others in ALIASES.values() for alias in others]
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else "esper train ppo --help lists all settings"
    raise UsageError(f"{key}: there is no such setting; {hint}")


def options_of(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a field's type: those of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def described(kind: Any) -> str:
    """What a field's type takes, for a message."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of names"
    if len(options_of(kind)) > 1:
        return " or ".join(described(option) for option in options_of(kind))
    names = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a text",
        NoneType: "null",
        Path: "a path",
    }
    return names[kind]


def shown(value: Any) -> str:
    """A user's value for a message, cut where it is long or deep."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def _typed(name: str, value: Any, kind: Any) -> Any:
    """``value`` as the field's type, or a UsageError that says what is expected."""
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
    raise UsageError(f"{name}: must be {described(kind)}, got {shown(value)}")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


_COUNTS = {
    "max_seeds": 1_000_000,
    "rounds": 10_000_000,
    "envs": 65_536,
    "group_size": 1_000_000,
    "episode_length": 100_000,
    "max_batches": 1_000_000,
    "batch_size": 65_536,
    "ppo_epochs": 1_000,
    "minibatches": 1_000_000,
    "lstm_hidden": 16_384,
    "rollout_steps": 100_000,
    "lr_decay_steps": 10_000_000,
    "lr_step_size": 10_000_000,
    "clip_decay_steps": 10_000_000,
    "clip_step_size": 10_000_000,
    "entropy_decay_steps": 10_000_000,
    "entropy_step_size": 10_000_000,
    "threads": os.cpu_count() or 1,
    "checkpoint_every": 10_000_000,
    "keep_checkpoints": 10_000_000,
}
"""Whole numbers from 1 on, with the most that makes sense."""
_POSITIVE = (
    "learning_rate",
    "value_learning_rate",
    "lr_adaptive_kl",
    "clip",
    "max_gradient_norm",
    "target_kl",
)
_FRACTION = ("discount", "trace_decay", "lr_warmup_frac")
_SHARE = ("lr_end_factor", "clip_end_factor", "entropy_end_factor")
_NOT_NEGATIVE = ("entropy", "value_weight", "stage_shaping", "rollback_penalty")


def check(config: TrainConfig) -> None:
    """Refuse values out of range.

    Raises:
        UsageError: names the field, its value and the range.
    """
    flat = flatten(config)
    ranges: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
        (_POSITIVE, "above 0 and at most 1e30", lambda v: 0.0 < v <= 1e30),
        (_FRACTION, "between 0 and 1", lambda v: 0.0 <= v <= 1.0),
        (_SHARE, "above 0 and at most 1", lambda v: 0.0 < v <= 1.0),
        (_NOT_NEGATIVE, "between 0 and 1e30", lambda v: 0.0 <= v <= 1e30),
        (("seed",), "between 0 and 4294967295", lambda v: 0 <= v < 2**32),
    )
    for name, most in _COUNTS.items():
        if flat.get(name) is not None and not 1 <= flat[name] <= most:
            raise UsageError(f"{name}: must lie between 1 and {most}, got {flat[name]}")
    for names, wanted, holds in ranges:
        for name in names:
            if flat.get(name) is not None and not holds(flat[name]):
                raise UsageError(f"{name}: must be {wanted}, got {flat[name]}")
    if not 0 <= config.learner.lr_warmup_steps <= 10_000_000:
        raise UsageError(
            "lr_warmup_steps: must lie between 0 and 10000000, "
            f"got {config.learner.lr_warmup_steps}"
        )
    if config.learner.lr_warmup_steps and config.learner.lr_warmup_frac:
        raise UsageError("lr_warmup_steps: lr_warmup_frac says the same; give one of them")
    if config.learner.lr_adaptive_kl is not None and config.learner.lr_decay != "none":
        raise UsageError("lr_adaptive_kl: it sets the step size itself; leave lr_decay out")
    machine = config.machine
    if machine.experimental_gpu_preload_gather and machine.gpu_preload is False:
        raise UsageError(
            "experimental_gpu_preload_gather: needs data on the device; leave out --no-gpu-preload"
        )
    if config.gymnasium.gym is not None and len(machine.devices) > 1:
        raise UsageError("devices: a Gymnasium task takes one; give --device")
    if config.world.batch_size == 1:
        raise UsageError("batch_size: must be at least 2, for BatchNorm needs more than one image")
