"""The events of an update and of a round's throughput."""

import math
import time
from collections.abc import Mapping

from torch import nn

from esper.leyline.actions import HEADS
from esper.leyline.events import AnalyticsSnapshot, Number, PPOUpdateCompleted, number
from esper.simic.ppo import PPOAgent
from esper.tolaria.precision import Precision

RATE = "learning_rate/"
"""Metrics that begin so are the step size of one parameter group each."""


def update_completed(
    round_number: int, agent: PPOAgent, metrics: Mapping[str, float]
) -> PPOUpdateCompleted:
    """What the agent's last update came to; the norm of a missing gradient is null."""
    told: dict[str, Number | None] = {name: number(value) for name, value in metrics.items()}
    for head in (*HEADS, "value"):
        name = f"head_grad_norms/{head}"
        if math.isnan(metrics.get(name, 0.0)) and _is_missing(agent.policy.head_parameters(head)):
            told[name] = None
    return PPOUpdateCompleted(
        time=time.time(), round=round_number, update=agent.updates, metrics=told
    )


def _is_missing(parameters: list[nn.Parameter]) -> bool:
    """Whether a gradient that should be there after an update is not."""
    return any(parameter.grad is None for parameter in parameters)


def snapshot(
    round_number: int,
    precision: Precision,
    metrics: Mapping[str, float],
    steps: int,
    rollout_seconds: float,
    update_seconds: float,
) -> AnalyticsSnapshot:
    """Throughput and precision of a round of ``steps`` environment steps."""
    rates = {
        name.removeprefix(RATE): value for name, value in metrics.items() if name.startswith(RATE)
    }
    return AnalyticsSnapshot(
        time=time.time(),
        round=round_number,
        amp_enabled=precision.enabled,
        amp_dtype=dtype_name(precision),
        learning_rate=metrics.get("learning_rate"),
        environment_steps_per_second=steps / (rollout_seconds + update_seconds),
        rollout_seconds=rollout_seconds,
        update_seconds=update_seconds,
        amp_scale=metrics.get("amp_scale"),
        learning_rates=rates,
    )


def dtype_name(precision: Precision) -> str | None:
    """The type of mixed precision, such as ``bfloat16``; None without it."""
    return str(precision.amp_dtype).removeprefix("torch.") if precision.amp_dtype else None
