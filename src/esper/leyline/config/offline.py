"""The settings of learning from records: ``esper train imitation`` and ``esper train offline``."""

import os
from dataclasses import dataclass
from typing import Literal

from esper.leyline.config.setting import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SEEDS,
    Range,
    setting,
    up_to,
)

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
    learning_rate: float = setting(1e-3, POSITIVE, aliases=("lr",))
    """Learning rate of Adam, for the policy and the critic."""
    value_weight: float = setting(0.5, NOT_NEGATIVE, aliases=("value_coef",))
    """Weight of the critic's error; with 0, a clone's critic learns nothing."""
    max_gradient_norm: float = setting(0.5, POSITIVE)
    """Maximum norm of the policy's gradient; larger gradients are clipped to it."""
    discount: float = setting(1.0, FRACTION, aliases=("gamma",))
    """Discount factor (gamma) of the returns per step."""
    lstm_hidden: int = setting(128, up_to(16_384), aliases=("lstm_hidden_dim",))
    """Width of the LSTM."""
    seed: int = setting(42, SEEDS)
    """Seed of the initial weights, of the held-out episodes and of the order of the others, in
    [0, 2^32)."""
    device: str = setting("cpu", on_resume=True)
    """Device of the policy, such as cpu or cuda:0."""
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune"] = setting(
        "auto", aliases=("compile_mode",), on_resume=True
    )
    """Mode of torch.compile for the training step. auto compiles on CUDA, but not on a CPU, where
    the native library computes the policy and compiling was slower."""
    amp: bool | None = setting(None, aliases=("use_amp",))
    """Whether encoder and LSTM learn in half precision; by default on CUDA only. The policy that
    results acts in float32. ESPER_DISABLE_AMP=1 disables it."""
    amp_dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """Dtype of --amp: bfloat16, float16 (with loss scaling), or auto (bfloat16; float16 on a device
    without bfloat16)."""
    tf32: bool = setting(True, on_resume=True)
    """Whether float32 products on CUDA are computed in TF32, which rounds their factors to 10 bits;
    --no-tf32 computes them in full precision. Has no effect on a CPU."""
    threads: int | None = setting(None, up_to(os.cpu_count() or 1), on_resume=True)
    """Number of CPU threads; by default torch decides."""
    telemetry_dir: str = setting("./runs", on_resume=True)
    """Directory in which the run creates its own directory."""
    name: str | None = None
    """Name of the run's own directory; by default the time and what is trained."""
    telemetry_level: Literal["off", "minimal", "normal", "debug"] = setting(
        "normal", on_resume=True
    )
    """Amount of telemetry: off (no events), or a few lines per epoch."""
    keep_checkpoints: int = setting(3, up_to(10_000_000), on_resume=True)
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
    trace_decay: float = setting(0.95, FRACTION, aliases=("gae_lambda",))
    """Lambda of vtrace."""
    entropy: float = setting(0.01, NOT_NEGATIVE, aliases=("entropy_coef",))
    """Weight of the entropy bonus of vtrace, in reward per nat; in vine, weight of the mean
    log-probability of the recorded branches, which keeps all of them possible."""
