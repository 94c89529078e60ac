"""Lines about a run beside its rounds: where schedules end, and the gradients of the heads."""

from dataclasses import fields
from typing import Any

from esper.leyline.config import LearnerConfig
from esper.simic.schedules import Schedules
from esper.tamiyo.policy.interface import Policy


def schedule_settings(config: LearnerConfig) -> dict[str, str | float | None]:
    """The settings of all schedules by name."""
    parts = ("_decay", "_end_factor", "_step_size", "_warmup", "_start_factor", "_adaptive_kl")
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {name: value for name, value in values.items() if any(p in name for p in parts)}


def schedule_ends(config: LearnerConfig) -> list[str]:
    """A line for every quantity that changes: to which value, until which update."""
    schedules = Schedules.of(config)
    quantities = {
        "learning rate": (schedules.policy_rate, config.lr_decay),
        "entropy weight": (schedules.entropy, config.entropy_decay),
        "clip range": (schedules.clip, config.clip_decay),
    }
    lines = [
        f"{name}: {one.at(one.warmup):g} becomes {one.at(one.horizon):g} by update {one.horizon} "
        f"({decay})"
        for name, (one, decay) in quantities.items()
        if one.decay != "none"
    ]
    if config.value_warmup_steps:
        first = config.value_weight_at(0)
        lines.append(
            f"value weight: {first:g} becomes {config.value_weight:g} by update "
            f"{config.value_warmup_steps}"
        )
    return lines


def gradient_counts(policy: Policy[Any]) -> list[str]:
    """A line per head: how many of its parameters have no gradient, one with NaN, a finite one.

    These are the gradients of the last minibatch, in the words of the prior system's debug probes.
    """
    lines = []
    for head in (*policy.heads, "value"):
        parameters = list(policy.head_parameters(head))
        gradients = [p.grad for p in parameters if p.grad is not None]
        finite = sum(bool(gradient.isfinite().all()) for gradient in gradients)
        lines.append(
            f"{head}_head: None={len(parameters) - len(gradients)}, "
            f"NaN/Inf={len(gradients) - finite}, Finite={finite} (of {len(parameters)} params)"
        )
    return lines
