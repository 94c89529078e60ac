"""The settings of learning from records: ``esper train imitation`` and ``esper train offline``."""

from dataclasses import dataclass
from typing import Literal

from esper.leyline.config.groups import (
    Compile,
    HalfPrecision,
    LearnerConfig,
    MachineConfig,
    OutputConfig,
    TelemetryLevel,
    WorldConfig,
)
from esper.leyline.config.setting import POSITIVE, Range, setting, shared, up_to

OfflineMethod = Literal["awr", "vine", "vtrace", "bc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImitationConfig:
    """Learn from the records of other runs to act as their policies did (docs/offline.md)."""

    records: tuple[str, ...] = ()
    """Run directories whose records are learned from; train them with --record."""
    skip_bad: bool = setting(False, on_resume=True)
    """Whether to leave out damaged records instead of refusing them."""
    held_out: float = setting(0.1, Range(0.0, 0.9))
    """Part of the episodes that is not learned from and that the epoch to keep is chosen by;
    episodes that share host and data are held out together. With 0, the last epoch is kept."""
    epochs: int = setting(60, up_to(10_000_000), aliases=("rounds",), on_resume=True)
    """Total number of passes over the records."""
    patience: int = setting(10, up_to(10_000_000), on_resume=True)
    """Number of epochs without a lower held-out loss after which learning ends."""
    batch_size: int = setting(16, up_to(65_536))
    """Number of whole episodes in a batch."""
    learning_rate: float = shared(LearnerConfig, "learning_rate")
    value_weight: float = shared(LearnerConfig, "value_weight")
    """Weight of the critic's error; with 0, a clone's critic learns nothing."""
    max_gradient_norm: float = shared(LearnerConfig, "max_gradient_norm")
    discount: float = shared(LearnerConfig, "discount")
    lstm_hidden: int = shared(LearnerConfig, "lstm_hidden")
    seed: int = shared(WorldConfig, "seed")
    """Seed of the initial weights, of the held-out episodes and of the order of the others, in
    [0, 2^32)."""
    device: str = shared(MachineConfig, "device")
    """Device of the policy, such as cpu or cuda:0."""
    compile: Compile = shared(MachineConfig, "compile", on_resume=True)
    """Mode of torch.compile for the training step. auto compiles on CUDA, but not on a CPU, where
    compiling was slower."""
    amp: bool | None = setting(None, aliases=("use_amp",))
    """Whether encoder and LSTM learn in half precision; by default on CUDA only. The policy that
    results acts in float32. ESPER_DISABLE_AMP=1 disables it."""
    amp_dtype: HalfPrecision = shared(MachineConfig, "amp_dtype")
    """Dtype of --amp: bfloat16, float16 (with loss scaling), or auto (bfloat16; float16 on a device
    without bfloat16)."""
    tf32: bool = shared(MachineConfig, "tf32")
    threads: int | None = shared(MachineConfig, "threads")
    """Number of CPU threads; by default torch decides."""
    telemetry_dir: str = shared(OutputConfig, "telemetry_dir")
    name: str | None = shared(OutputConfig, "name")
    telemetry_level: TelemetryLevel = shared(OutputConfig, "telemetry_level")
    """Amount of telemetry: off (no events), or a few lines per epoch."""
    keep_checkpoints: int = shared(OutputConfig, "keep_checkpoints")
    """Number of most recent checkpoints to keep; an epoch is saved if it is the best so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineConfig(ImitationConfig):
    """Learn a better policy from the records of other runs, without acting (docs/offline.md)."""

    method: OfflineMethod = "awr"
    """How to learn: awr (advantage-weighted regression) imitates good actions more than others and
    takes records of any policy; vine compares the episodes of a group, which share host and data,
    and takes records in which they act differently; vtrace (off-policy actor-critic) takes those
    of policies that drew their actions at random; bc clones every action, as esper train imitation
    does."""
    temperature: float = setting(0.25, POSITIVE)
    """Temperature of awr (beta) and vine, in standard deviations of the returns. In awr an action
    counts by exp(advantage / temperature): the lower, the fewer actions count. In vine the expected
    return counts by 1 / temperature against staying among the recorded actions."""
    weight_cap: float = setting(20.0, Range(1.0, 1e6))
    """Maximum of exp(advantage / temperature) in awr."""
    rho_clip: float = setting(1.0, POSITIVE)
    """Maximum importance ratio in the errors of vtrace (rho bar), see esper train impala."""
    c_clip: float = setting(1.0, POSITIVE)
    """Maximum importance ratio in the traces of vtrace (c bar), at most rho_clip."""
    trace_decay: float = shared(LearnerConfig, "trace_decay")
    """Lambda of vtrace."""
    entropy: float = shared(LearnerConfig, "entropy")
    """Weight of the entropy bonus of vtrace, in reward per nat; in vine, weight of the mean
    log-probability of the recorded branches, which keeps all of them possible."""
