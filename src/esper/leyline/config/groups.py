"""The settings in groups, each a field of a frozen dataclass, with its default and what it means.

Each field is one setting, with everything there is to know about it; see ``setting``.
"""

import os
from dataclasses import dataclass, field
from typing import Literal

from esper.leyline.config.setting import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SEEDS,
    SHARE,
    Range,
    setting,
    up_to,
)

Reward = Literal["terminal", "paired", "utility", "shaped", "simplified", "basic", "sparse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldConfig:
    """What is trained, and for how long."""

    task: tuple[str, ...] = setting(("digits_shift",), only="growth")
    """What the hosts learn: one or more tasks, or a suite; `esper tasks` lists them. Each group of
    environments draws one of them for every episode."""
    plugin: tuple[str, ...] = setting((), on_resume=True)
    """Python files with tasks and blueprints of your own."""
    data_dir: str = setting("./data", only="growth", on_resume=True)
    """Directory with the files of tasks that read any: cifar-10-batches-bin or -py in it."""
    text_file: str | None = setting(None, only="growth")
    """Text whose bytes the tasks on text learn; the licence and documentation of Esper when not
    given."""
    slots: tuple[str, ...] = setting((), only="growth")
    """Where seeds may grow: names such as r0c0, or early, mid, late; all slots when not given."""
    max_seeds: int | None = setting(None, up_to(1_000_000), only="growth")
    """Most living seeds an environment may have; as many as it has slots when not given."""
    rounds: int = setting(
        30,
        up_to(10_000_000),
        aliases=("episodes", "n_episodes"),
        defaults={"gym": 100, "heuristic": 1},
        on_resume=True,
    )
    """Rounds in total; each is one episode of every environment and one PPO update."""
    envs: int = setting(32, up_to(65_536), aliases=("n_envs",), defaults={"gym": 8})
    """Environments that train at once, twins not counted."""
    group_size: int = setting(8, up_to(1_000_000), only="growth")
    """Environments that share initial host, data and one never-grow twin."""
    episode_length: int | None = setting(
        None, up_to(100_000), aliases=("max_epochs",), only="growth"
    )
    """Environment steps of an episode, each an epoch of the host; the task's own when not given."""
    max_batches: int | None = setting(None, up_to(1_000_000), only="growth")
    """Minibatches of an environment step; the task's own when not given."""
    batch_size: int | None = setting(
        None, Range(2, 65_536), aliases=("batch_size_per_env",), only="growth"
    )
    """Images of a minibatch, 2 or more for BatchNorm; the task's own when not given."""
    reward: Reward = setting("paired", aliases=("reward_mode",), only="growth")
    """What is paid for: the final utility, on the last step (terminal) or step by step against the
    twin (paired); utility in every step; or one of the prior system's modes. See docs/rewards.md.
    """
    stage_shaping: float = setting(0.0, NOT_NEGATIVE, only="growth")
    """Weight of the stages' potential in the reward; it changes no optimal policy."""
    rollback_penalty: float = setting(1.0, NOT_NEGATIVE, only="growth")
    """Taken from the reward of a step in which the governor rolls a host back."""
    strict_gates: bool = setting(False, only="growth")
    """Whether seeds must also have improved something to pass a gate."""
    one_at_a_time: bool = setting(True, only="growth")
    """Whether a seed may germinate only while no other seed develops."""
    seed: int = setting(42, SEEDS)
    """Root of every random number, in [0, 2^32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GymConfig:
    """A Gymnasium task in the place of networks that grow (docs/gymnasium.md)."""

    gym: str | None = setting(None, only="gym")
    """Id of the environment, such as CartPole-v1, or module:id. Settings of growing networks are
    refused with it, and others have defaults of their own."""
    gym_args: tuple[str, ...] = setting((), only="gym")
    """Arguments of the environment, each NAME=VALUE with the value as in JSON: length=32."""
    rollout_steps: int = setting(128, up_to(100_000), only="gym")
    """Steps of each environment between two updates; a round has this many."""
    memory: Literal["lstm", "none"] = setting("lstm", only="gym")
    """What the policy remembers with; without memory it sees the present alone."""
    critic: Literal["shared", "separate"] = setting("shared", only="gym")
    """Whether the critic shares the actor's encoder and memory, or has its own, which costs twice
    as much."""
    normalise_observations: bool = setting(True, only="gym")
    """Whether features of a Box are shifted and scaled by running moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How the policy learns (PPO)."""

    learning_rate: float = setting(1e-3, POSITIVE, aliases=("lr",), defaults={"gym": 1.5e-3})
    """Step size of Adam, for policy and critic."""
    value_learning_rate: float | None = setting(None, POSITIVE)
    """Step size for the critic's own layers; as for the policy when not given. The schedule below
    is that of both."""
    lr_warmup_frac: float = setting(0.0, FRACTION)
    """Share of the decay's steps over which step sizes rise linearly."""
    lr_warmup_steps: int = setting(0, Range(0, 10_000_000))
    """The same as a number of updates; give one of the two."""
    lr_decay: Literal["none", "linear", "cosine", "step"] = "none"
    """How step sizes fall after the warmup. ESPER_DISABLE_LR_SCHEDULE=1 keeps them constant."""
    lr_decay_steps: int = setting(30, up_to(10_000_000))
    """Update from which their end value holds, counted from the start of the run; it does not
    follow --rounds, so that a run that goes on later keeps its schedule."""
    lr_end_factor: float = setting(0.1, SHARE)
    """Their end value as a share of the step size."""
    lr_step_size: int = setting(10, up_to(10_000_000))
    """Updates of a stair of --lr-decay step."""
    lr_adaptive_kl: float | None = setting(None, POSITIVE)
    """Approximate KL in nats that an update should have: step sizes follow it. Not with
    --lr-decay."""
    ppo_epochs: int = setting(
        4, up_to(1_000), aliases=("recurrent_n_epochs",), defaults={"gym": 10}
    )
    """Passes over each round's episodes."""
    minibatches: int = setting(4, up_to(1_000_000))
    """Parts of a pass, each a set of whole episodes."""
    clip: float = setting(0.2, POSITIVE, aliases=("clip_ratio",))
    """Trust region of the importance ratio, 1 plus or minus this."""
    clip_decay: Literal["none", "linear", "cosine", "step"] = "none"
    """How the clip falls; clip_decay_steps, clip_end_factor and clip_step_size are as for the step
    size."""
    clip_decay_steps: int = setting(30, up_to(10_000_000))
    """Update from which its end value holds."""
    clip_end_factor: float = setting(0.1, SHARE)
    """Its end value as a share of the clip."""
    clip_step_size: int = setting(10, up_to(10_000_000))
    """Updates of a stair of --clip-decay step."""
    discount: float = setting(1.0, FRACTION, aliases=("gamma",), defaults={"gym": 0.99})
    """Gamma, a factor a step."""
    trace_decay: float = setting(0.95, FRACTION, aliases=("gae_lambda",), defaults={"gym": 0.98})
    """Lambda of generalised advantage estimation."""
    entropy: float = setting(0.01, NOT_NEGATIVE, aliases=("entropy_coef",), defaults={"gym": 0.0})
    """Weight of the entropy bonus, reward a nat."""
    entropy_decay: Literal["none", "linear", "cosine", "step"] = "none"
    """How the entropy weight falls; entropy_decay_steps, entropy_end_factor and entropy_step_size
    are as for the step size."""
    entropy_decay_steps: int = setting(30, up_to(10_000_000))
    """Update from which its end value holds."""
    entropy_end_factor: float = setting(0.1, SHARE)
    """Its end value as a share of the entropy weight."""
    entropy_step_size: int = setting(10, up_to(10_000_000))
    """Updates of a stair of --entropy-decay step."""
    value_weight: float = setting(0.5, NOT_NEGATIVE, aliases=("value_coef",))
    """Weight of the value loss."""
    max_gradient_norm: float = setting(0.5, POSITIVE)
    """Norm at which the policy's gradient is clipped."""
    target_kl: float = setting(0.05, POSITIVE)
    """A round stops learning once approximate KL, in nats, is above 1.5 times this."""
    lstm_hidden: int = setting(
        128, up_to(16_384), aliases=("lstm_hidden_dim",), defaults={"gym": 64}
    )
    """Width of the LSTM."""
    amp_policy: bool = False
    """Compute the policy's encoder and LSTM in half precision, when acting and when
    learning; heads, log-probs and losses stay in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineConfig:
    """Where it runs, and in which precision."""

    device: str = setting("cpu", on_resume=True)
    """cpu, or cuda:0 and so on: where the policy is, and everything else unless hosts are dealt."""
    devices: tuple[str, ...] = setting(("cpu",), on_resume=True)
    """Devices over which the hosts are dealt, such as cuda:0 cuda:1; the policy decides for all on
    the first. See docs/devices.md."""
    gpu_preload: bool | None = setting(None, only="growth", on_resume=True)
    """Whether training data live on a CUDA device (--gpu-preload) or in page-locked memory of the
    host, from where each minibatch is copied (--no-gpu-preload); small data live on the device when
    not given. On a CPU they are where they are."""
    experimental_gpu_preload_gather: bool = setting(False, only="growth", on_resume=True)
    """Pick minibatches on the device: what --gpu-preload does anyway, and implied by this."""
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune"] = setting(
        "auto", aliases=("compile_mode",)
    )
    """Compile what surrounds the policy's LSTM, in one of torch.compile's modes; auto does it on
    CUDA, where steps are captured as CUDA graphs too, and not on a CPU, where it was slower."""
    threads: int | None = setting(None, up_to(os.cpu_count() or 1), on_resume=True)
    """CPU threads; the environments are dealt over them. As torch chooses when not given."""
    backend: Literal["auto", "torch", "native"] = setting("auto", only="growth", on_resume=True)
    """What computes the hosts: native (C++, on a CPU, compiled once on first use), torch
    (everywhere), or auto, which is native wherever that can be had."""
    use_amp: bool = setting(False, aliases=("amp",), only="growth")
    """Mixed precision for the hosts: on CUDA, and on a CPU with --backend torch.
    ESPER_DISABLE_AMP=1 forbids it."""
    amp_dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """In which of the two --use-amp computes: bfloat16, float16 with scaled losses, or auto, which
    is bfloat16 where the device has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """What is written, and where."""

    telemetry_dir: str = setting("./runs", on_resume=True)
    """Directory in which the run's own directory is made."""
    telemetry_level: Literal["off", "minimal", "normal", "debug"] = setting(
        "normal", on_resume=True
    )
    """How much is written, never what is computed: off (no events), minimal (a few lines a
    round), normal (every step), debug (every seed's signals)."""
    tensorboard: bool = setting(False, on_resume=True)
    """Whether to write curves for TensorBoard, into the run directory; needs the extra
    `trackers`."""
    wandb: bool = setting(False, on_resume=True)
    """Whether to write an offline run for Weights & Biases, into the run directory; needs the
    extra `trackers`."""
    checkpoint_every: int = setting(1, up_to(10_000_000), on_resume=True)
    """Rounds between checkpoints; the last round always has one."""
    keep_checkpoints: int = setting(3, up_to(10_000_000), on_resume=True)
    """How many of the latest checkpoints stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of a run."""

    world: WorldConfig = field(default_factory=WorldConfig)
    gymnasium: GymConfig = field(default_factory=GymConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
