"""The settings by group: each is a field of a frozen dataclass with a default and a docstring.

The docstring of a field is its help text on the command line; see ``setting`` for the rest.
"""

import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from esper.leyline.config.algorithm import AlgorithmConfig
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

Compile = Literal["auto", "off", "default", "reduce-overhead", "max-autotune"]
HalfPrecision = Literal["auto", "bfloat16", "float16"]
TelemetryLevel = Literal["off", "minimal", "normal", "debug"]
Reward = Literal[
    "terminal",
    "paired",
    "utility",
    "shaped",
    "escrow",
    "simplified",
    "basic",
    "basic_plus",
    "sparse",
    "loss_change",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRules:
    """What an environment pays for and allows: runs that agree in it can be compared."""

    reward: Reward = setting("paired", aliases=("reward_mode",), only="growth", main=True)
    """Reward mode. terminal: the final utility, paid on the last step. paired: the final utility
    relative to the twin, paid step by step. utility: the utility of every step. The others are
    modes of the prior system. See docs/rewards.md."""
    stage_shaping: float = setting(0.0, NOT_NEGATIVE, only="growth")
    """Weight of the potential-based reward for the stages of the seeds; it does not change which
    policy is optimal."""
    rollback_penalty: float = setting(1.0, NOT_NEGATIVE, only="growth")
    """Penalty subtracted from the reward of a step in which the governor rolls the host back."""
    strict_gates: bool = setting(False, only="growth")
    """Whether gates also require a measured improvement by the seed."""
    auto_advance: tuple[str, ...] = setting((), only="growth")
    """Gates that open by themselves: g1 (to TRAINING), g2 (to BLENDING) and g3 (to HOLDING). A seed
    that meets the condition of such a gate advances at the end of the step; ADVANCE is masked for
    it."""
    reward_options: tuple[str, ...] = setting((), only="growth")
    """Numbers of the reward modes of the prior system, such as parameter_budget=200000; see
    docs/from-esper-lite.md."""
    one_at_a_time: bool = setting(True, only="growth")
    """Whether a seed may germinate only while no other seed is germinated or training and no slot
    is closed after a prune."""

    def rules(self) -> dict[str, Any]:
        """The rules alone, by name."""
        return {f.name: getattr(self, f.name) for f in fields(EpisodeRules)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldConfig(EpisodeRules):
    """What to train, and for how long."""

    task: tuple[str, ...] = setting(("digits_shift",), only="growth", main=True)
    """Tasks that the hosts learn: names of tasks or suites; `esper tasks` lists them. Each group of
    environments draws one of the tasks for each episode."""
    plugin: tuple[str, ...] = setting((), on_resume=True, main=True)
    """Python files that register your own tasks and blueprints."""
    data_dir: str = setting("./data", only="growth", on_resume=True)
    """Directory with the data files of tasks that need them, such as cifar-10-batches-bin or
    cifar-10-batches-py."""
    text_file: str | None = setting(None, only="growth")
    """Text file whose bytes the text tasks learn to predict; by default Esper's licence and
    documentation."""
    split_seed: int = setting(0, SEEDS, only="growth")
    """Seed of the split into training, validation and test images, in [0, 2^32), for tasks that
    draw it; data in files and texts have a fixed split and ignore it."""
    slots: tuple[str, ...] = setting((), only="growth", main=True)
    """Slots in which seeds may grow: names such as r0c0 or wide0, or early, mid, late; wide stands
    for all slots in which a layer becomes wider. By default all others."""
    max_seeds: int | None = setting(None, up_to(1_000_000), only="growth")
    """Maximum number of living seeds per environment; by default that of the task, or its number of
    slots."""
    rounds: int = setting(
        30,
        up_to(10_000_000),
        aliases=("episodes", "n_episodes"),
        defaults={"gym": 100, "heuristic": 1},
        on_resume=True,
        main=True,
    )
    """Total number of rounds; a round is one episode of every environment and one update."""
    envs: int = setting(32, up_to(65_536), aliases=("n_envs",), defaults={"gym": 8}, main=True)
    """Number of environments that train in parallel, not counting never-grow twins."""
    group_size: int = setting(8, up_to(1_000_000), only="growth", main=True)
    """Number of environments that share the initial host, the data and one never-grow twin."""
    common_seeds: bool = setting(False, only="growth")
    """Whether seeds that germinate in the same step and slot of a group start from the same
    weights. Environments of a group then stay equal until their actions differ."""
    episode_length: int | None = setting(
        None, up_to(100_000), aliases=("max_epochs",), only="growth", main=True
    )
    """Environment steps per episode; the host trains for one epoch per step. By default set by
    the task."""
    max_batches: int | None = setting(None, up_to(1_000_000), only="growth")
    """Minibatches per environment step; by default set by the task."""
    batch_size: int | None = setting(
        None, Range(2, 65_536), aliases=("batch_size_per_env",), only="growth"
    )
    """Samples per minibatch, at least 2 because of BatchNorm; by default set by the task."""
    host_gradient_norm: float | None = setting(None, POSITIVE, only="growth")
    """Norm to which the gradient of each host and of each seed is clipped; by default that of the
    task, which is 1 unless it says otherwise."""
    validation_part: int | None = setting(None, up_to(10_000_000), only="growth")
    """Validation images of a step, a part in turn; the last steps of an episode take all. By
    default set by the task, which is all of them unless it says otherwise."""
    seed: int = setting(42, SEEDS, main=True)
    """Root seed of all random numbers, in [0, 2^32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GymConfig:
    """A Gymnasium task instead of growing networks (docs/gymnasium.md)."""

    gym: str | None = setting(None, only="gym", main=True)
    """Id of the environment, such as CartPole-v1 or module:id. Settings of growing networks are
    then refused, and some other settings have different defaults."""
    gym_args: tuple[str, ...] = setting((), only="gym")
    """Arguments of the environment, each as NAME=VALUE with the value in JSON, such as
    length=32."""
    rollout_steps: int = setting(128, up_to(100_000), only="gym", main=True)
    """Steps per environment between two updates, which is the length of a round."""
    vectorization: Literal["sync", "async", "vector"] = setting("sync", only="gym")
    """How the environments run, as in Gymnasium: in this process in turns; in a process each, with
    the same results; or as the VectorEnv that the id registers."""
    encoder: str | None = setting(None, only="gym")
    """Name of an encoder of observations that a plugin registers (docs/gymnasium.md); by default a
    linear layer."""
    memory: Literal["lstm", "none"] = setting("lstm", only="gym")
    """Memory of the policy; with none, the policy sees only the current observation."""
    critic: Literal["shared", "separate"] = setting("shared", only="gym")
    """Whether the critic shares the actor's encoder and memory or has its own, which doubles the
    cost."""
    normalise_observations: bool = setting(True, only="gym")
    """Whether to normalise Box observations by their running mean and variance."""
    evaluate_every: int = setting(10, Range(0, 10_000_000), only="gym", on_resume=True, main=True)
    """Rounds between evaluations: the most probable actions in fresh episodes. The checkpoint of
    the best one is kept beside the latest. 0 for none."""
    evaluation_episodes: int = setting(10, up_to(10_000), only="gym")
    """Episodes of an evaluation."""
    stop_at: float | None = setting(None, only="gym", on_resume=True)
    """Mean return of an evaluation at which the run ends."""
    episode_limit: int = setting(30_000, up_to(10_000_000), only="gym")
    """Steps after which an episode is truncated. A checkpoint holds the actions of the current
    episodes, and resuming repeats them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodConfig:
    """The learning algorithm. No flag sets it: the command does."""

    algorithm: str = "ppo"
    """Algorithm by which the policy learns: esper train ppo, impala, imitation or offline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How the policy learns."""

    learning_rate: float = setting(
        1e-3, POSITIVE, aliases=("lr",), defaults={"gym": 1.5e-3}, main=True
    )
    """Learning rate of Adam, for the policy and the critic."""
    value_learning_rate: float | None = setting(None, POSITIVE)
    """Learning rate of the critic's own layers; by default that of the policy. The schedule of the
    learning rate applies to both."""
    lr_warmup_frac: float = setting(0.0, FRACTION)
    """Length of the linear warmup of the learning rate, as a fraction of lr_decay_steps."""
    lr_warmup_steps: int = setting(0, Range(0, 10_000_000))
    """Length of the linear warmup of the learning rate, in updates; give either this or
    lr_warmup_frac."""
    lr_decay: Literal["none", "linear", "cosine", "step"] = setting(
        "none", defaults={"gym": "linear"}
    )
    """Decay of the learning rate after the warmup. ESPER_DISABLE_LR_SCHEDULE=1 keeps the rate
    constant."""
    lr_decay_steps: int | None = setting(None, up_to(10_000_000))
    """Update at which the learning rate reaches its final value, counted from the start of the run.
    By default the --rounds with which the run is started; a run that is extended later keeps its
    schedule."""
    lr_end_factor: float = setting(0.1, SHARE, defaults={"gym": 0.01})
    """Final learning rate as a fraction of the initial one."""
    lr_step_size: int = setting(10, up_to(10_000_000))
    """Updates between two reductions with --lr-decay step."""
    lr_adaptive_kl: float | None = setting(None, POSITIVE)
    """Target for the approximate KL divergence of an update, in nats: the learning rate adapts to
    meet it. Cannot be combined with --lr-decay."""
    ppo_epochs: int = setting(
        4, up_to(1_000), aliases=("recurrent_n_epochs",), defaults={"gym": 10}, main=True
    )
    """Passes over the rollout of each round."""
    minibatches: int = setting(4, up_to(1_000_000), main=True)
    """Minibatches per pass, each a set of whole sequences: episodes, or for a Gymnasium task the
    part of each episode within the rollout."""
    clip: float = setting(0.2, POSITIVE, aliases=("clip_ratio",))
    """PPO clip range: the importance ratio is clipped to 1 plus or minus this."""
    clip_decay: Literal["none", "linear", "cosine", "step"] = "none"
    """Decay of the clip range; clip_decay_steps, clip_end_factor and clip_step_size work like the
    settings of lr_decay."""
    clip_decay_steps: int | None = setting(None, up_to(10_000_000))
    """Update at which the clip range reaches its final value; by default as for lr_decay_steps."""
    clip_end_factor: float = setting(0.1, SHARE)
    """Final clip range as a fraction of the initial one."""
    clip_step_size: int = setting(10, up_to(10_000_000))
    """Updates between two reductions with --clip-decay step."""
    discount: float = setting(1.0, FRACTION, aliases=("gamma",), defaults={"gym": 0.99}, main=True)
    """Discount factor (gamma) per step."""
    trace_decay: float = setting(0.95, FRACTION, aliases=("gae_lambda",), defaults={"gym": 0.98})
    """Lambda of generalised advantage estimation (GAE) and of V-trace."""
    group_baseline: bool | None = setting(None, only="growth")
    """Subtract from each advantage the mean of those of the other environments of its group in the
    same step (leave-one-out). A group shares its host, so what is left does not depend on how much
    that host can gain. PPO does so by default where all groups are whole."""
    entropy: float = setting(0.01, NOT_NEGATIVE, aliases=("entropy_coef",), main=True)
    """Weight of the entropy bonus, in reward per nat."""
    entropy_per_head: tuple[str, ...] = setting((), only="growth")
    """Factors of the entropy weight by head, such as op=1 blueprint=1.3; 1 for the other heads."""
    entropy_decay: Literal["none", "linear", "cosine", "step"] = setting(
        "none", defaults={"gym": "linear"}
    )
    """Decay of the entropy weight; entropy_decay_steps, entropy_end_factor and entropy_step_size
    work like the settings of lr_decay."""
    entropy_decay_steps: int | None = setting(None, up_to(10_000_000))
    """Update at which the entropy weight reaches its final value; by default as for
    lr_decay_steps."""
    entropy_end_factor: float = setting(0.1, Range(0.0, 1e6, open=True), defaults={"gym": 0.01})
    """Final entropy weight as a fraction of the initial one."""
    entropy_step_size: int = setting(10, up_to(10_000_000))
    """Updates between two reductions with --entropy-decay step."""
    value_weight: float = setting(0.5, NOT_NEGATIVE, aliases=("value_coef",))
    """Weight of the value loss."""
    value_warmup_steps: int = setting(0, Range(0, 10_000_000))
    """Updates over which the weight of the value loss rises linearly to its value; 0 for none."""
    value_start_factor: float = setting(0.1, NOT_NEGATIVE)
    """Weight of the value loss in the first update of that warmup, as a fraction of its value."""
    max_gradient_norm: float = setting(0.5, POSITIVE)
    """Maximum norm of the policy's gradient; larger gradients are clipped to it."""
    target_kl: float = setting(0.05, POSITIVE)
    """Target for the approximate KL divergence, in nats: an update stops early once the divergence
    exceeds 1.5 times this."""
    lstm_hidden: int = setting(
        128, up_to(16_384), aliases=("lstm_hidden_dim",), defaults={"gym": 64}
    )
    """Width of the LSTM."""
    initial_policy: str | None = setting(None, only="growth", main=True)
    """Policy that learning starts from, with its critic and the moments of its observations: the
    run directory of PPO, IMPALA, imitation or offline learning, or a learned policy that comes with
    Esper, by its name. Its LSTM must have the same width. By default learning starts from random
    weights."""
    amp_policy: bool = False
    """Compute the policy's encoder and LSTM in half precision, both when acting and when learning;
    heads, log-probabilities and losses stay in float32."""

    def value_weight_at(self, update: int) -> float:
        """Weight of the value loss in an update: linear over the warmup, then constant."""
        progress = min(1.0, update / max(1, self.value_warmup_steps))
        start = self.value_start_factor
        return self.value_weight * (start + (1.0 - start) * progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineConfig:
    """Where the run computes, and in which precision."""

    device: str = setting("cpu", on_resume=True, main=True)
    """Device of the policy, such as cpu or cuda:0, and of the hosts unless devices is given."""
    devices: tuple[str, ...] = setting(("cpu",), on_resume=True)
    """Devices across which the hosts are distributed, such as cuda:0 cuda:1; the policy runs on the
    first and acts for all hosts. See docs/devices.md."""
    gpu_preload: bool | None = setting(None, only="growth", on_resume=True)
    """Whether training data stay in the memory of the CUDA device (--gpu-preload) or in page-locked
    host memory, from which each minibatch is copied (--no-gpu-preload); by default small data sets
    are preloaded. Has no effect on a CPU."""
    experimental_gpu_preload_gather: bool = setting(False, only="growth", on_resume=True)
    """Gather minibatches on the device, as --gpu-preload always does; implies --gpu-preload."""
    compile: Compile = setting("auto", aliases=("compile_mode",))
    """Mode of torch.compile for the policy's layers around the LSTM. auto compiles on CUDA, where
    steps are also captured as CUDA graphs, but not on a CPU, where compiling was slower."""
    threads: int | None = setting(None, up_to(os.cpu_count() or 1), on_resume=True, main=True)
    """Number of CPU threads, across which the hosts are distributed; by default torch decides, and
    a Gymnasium task has one."""
    backend: Literal["auto", "torch", "native", "triton"] = setting(
        "auto", only="growth", on_resume=True
    )
    """Backend that computes the hosts: native (C++, CPU only, compiled on first use), torch (any
    device), triton (CUDA only, for convolutional hosts and MLPs; compiles for a minute on first
    use), or auto (native where available, else torch)."""
    use_amp: bool = setting(False, aliases=("amp",), only="growth")
    """Train the hosts in mixed precision: on CUDA, on a CPU that multiplies bfloat16 (wide
    convolutions), or with --backend torch. ESPER_DISABLE_AMP=1 disables it."""
    amp_dtype: HalfPrecision = "auto"
    """Dtype of --use-amp and --amp-policy: bfloat16, float16 (with loss scaling), or auto
    (bfloat16; float16 on a device without bfloat16)."""
    tf32: bool = setting(True, on_resume=True)
    """Whether float32 products on CUDA are computed in TF32, which rounds their factors to 10 bits;
    --no-tf32 computes them in full precision. Has no effect on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """What the run writes, and where."""

    telemetry_dir: str = setting("./runs", on_resume=True, main=True)
    """Directory in which the run creates its own directory."""
    name: str | None = setting(None, main=True)
    """Name of the run's own directory; by default the time and what is trained."""
    telemetry_level: TelemetryLevel = setting("normal", on_resume=True, main=True)
    """Amount of telemetry: off (no events), minimal (a few lines per round), normal (every step),
    debug (also the signals of every seed). It does not affect what is computed."""
    events_megabytes: int = setting(8, up_to(1_000_000), on_resume=True)
    """Size in MiB at which the lines of events.jsonl move to a compressed file in the folder events
    of the run directory."""
    tensorboard: bool = setting(False, on_resume=True)
    """Whether to write TensorBoard curves to the run directory; requires the extra `trackers`."""
    wandb: bool = setting(False, on_resume=True)
    """Whether to write an offline Weights & Biases run to the run directory; requires the extra
    `trackers`."""
    checkpoint_every: int = setting(1, up_to(10_000_000), on_resume=True)
    """Rounds between two checkpoints; the last round is always saved."""
    keep_checkpoints: int = setting(3, up_to(10_000_000), on_resume=True)
    """Number of most recent checkpoints to keep."""
    record: bool = setting(False, on_resume=True, main=True)
    """Whether to keep the rollout of each round (observations, actions, log-probs, values, rewards)
    as a file in the run directory; see docs/records.md."""
    record_last: int | None = setting(None, up_to(10_000_000), on_resume=True)
    """Number of most recent rounds whose records are kept; by default all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of a run."""

    world: WorldConfig = field(default_factory=WorldConfig)
    gymnasium: GymConfig = field(default_factory=GymConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Those that only the algorithm of the run has."""
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    @property
    def baseline_group(self) -> int | None:
        """Environments of a group if their mean is a baseline, see ``group_baseline``."""
        size, wish = self.world.group_size, self.learner.group_baseline
        if wish is None:
            wish = self.method.algorithm == "ppo" and size > 1 and self.world.envs % size == 0
        return size if wish else None
