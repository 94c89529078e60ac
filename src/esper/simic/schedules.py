"""Learning rates and weights as pure functions of the number of updates done.

Schedules have no state, so a resumed run takes the same values as an uninterrupted one. The
exception is ``AdaptiveRate``, a factor that follows the KL divergence; its state is saved.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.config import LearnerConfig
from esper.leyline.switches import switched_on

DISABLE_VARIABLE = "ESPER_DISABLE_LR_SCHEDULE"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A value that warms up and then decays.

    Attributes:
        initial: the value between warmup and decay.
        warmup: updates over which it rises linearly; update 0 has ``initial / warmup``.
        decay: ``none``, ``linear``, ``cosine`` (Loshchilov and Hutter, 2017, without restarts) or
            ``step``, which falls by equal factors.
        horizon: update from which the end value holds, counted from the start of the run.
        end_factor: end value divided by ``initial``.
        step_size: updates per stair of ``step``.
    """

    initial: float
    warmup: int = 0
    decay: str = "none"
    horizon: int = 1
    end_factor: float = 1.0
    step_size: int = 1

    def at(self, update: int) -> float:
        """The value for update number ``update``, counted from 0."""
        if update < self.warmup:
            return self.initial * (update + 1) / self.warmup
        return self.initial * self._factor(update)

    def _factor(self, update: int) -> float:
        if self.decay == "none":
            return 1.0
        span = max(1, self.horizon - self.warmup)
        done = min(update - self.warmup, span)
        end = self.end_factor
        if self.decay == "linear":
            return 1.0 + (end - 1.0) * done / span
        if self.decay == "cosine":
            return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * done / span))
        assert self.decay == "step", self.decay
        stairs = -(-span // self.step_size)
        step = stairs if done == span else done // self.step_size
        return float(end ** (step / stairs))


@dataclass(frozen=True, slots=True)
class Schedules:
    """The scheduled quantities of an update.

    Attributes:
        policy_rate, value_rate: Adam's learning rates for actor and critic.
        entropy: weight of the entropy bonus.
        clip: clip range of the importance ratio.
    """

    policy_rate: Schedule
    value_rate: Schedule
    entropy: Schedule
    clip: Schedule

    @classmethod
    def of(cls, config: LearnerConfig) -> "Schedules":
        """The schedules of the settings; ``DISABLE_VARIABLE`` keeps learning rates constant."""

        def schedule(prefix: str, initial: float, warmup: int = 0) -> Schedule:
            parts = "decay", "decay_steps", "end_factor", "step_size"
            decay, steps, end, size = (getattr(config, prefix + part) for part in parts)
            return Schedule(initial, warmup, decay, _end(steps, decay), end, size)

        def rate(initial: float) -> Schedule:
            if switched_on(DISABLE_VARIABLE):
                return Schedule(initial)
            return schedule("lr_", initial, warmup_updates(config))

        return cls(
            policy_rate=rate(config.learning_rate),
            value_rate=rate(config.value_learning_rate or config.learning_rate),
            entropy=schedule("entropy_", config.entropy),
            clip=schedule("clip_", config.clip),
        )


def _end(steps: int | None, decay: str) -> int:
    assert steps is not None or decay == "none", "with_horizons gives every schedule an end"
    return steps or 1


def warmup_updates(config: LearnerConfig) -> int:
    """Number of updates over which the learning rate rises; independent of the number of rounds."""
    if config.lr_warmup_steps:
        return config.lr_warmup_steps
    return math.ceil(config.lr_warmup_frac * _end(config.lr_decay_steps, config.lr_decay))


class AdaptiveRate:
    """A factor on the learning rate that keeps the KL divergence of an update near a target.

    The factor is divided by 1.5 after an update whose KL was above twice the target, and multiplied
    by 1.5 after one whose KL was below half of it: the bounds of rsl_rl, applied once per update as
    in the adaptive penalty of Schulman et al. (2017). The factor stays on the device, so adapting
    it needs no transfer. ``DISABLE_VARIABLE`` keeps the learning rate constant.

    Args:
        target: KL divergence in nats.
        device: device of the factor.
    """

    STEP, MIN_FACTOR, MAX_FACTOR = 1.5, 1e-3, 1e2

    def __init__(self, target: float, device: torch.device):
        self.target, self.active = target, not switched_on(DISABLE_VARIABLE)
        self.factor = torch.ones((), device=device)

    def adapt(self, kl: Tensor) -> None:
        """Adapt the factor to the mean KL of an update's last epoch; NaN leaves it unchanged."""
        if not self.active:
            return
        down, up = kl > 2.0 * self.target, (kl < 0.5 * self.target) & kl.isfinite()
        change = torch.where(down, 1.0 / self.STEP, torch.where(up, self.STEP, 1.0))
        self.factor.mul_(change).clamp_(self.MIN_FACTOR, self.MAX_FACTOR)
