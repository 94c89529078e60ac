"""The ranges in which settings must lie, and which of them go together."""

import os
from collections.abc import Callable
from typing import Any

from esper.leyline.config.groups import TrainConfig
from esper.leyline.config.reading import flatten
from esper.leyline.errors import UsageError

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
