"""The metrics of an update: gathered on the device and copied to the CPU in one transfer."""

from typing import Any

import torch
from torch import Tensor

from esper.leyline.metrics import Metric, part_metric

Metrics = dict[str, Any]
"""Metrics of a minibatch by name: scalar tensors or ``[heads]``; None for a missing gradient."""


def summarise(
    minibatches: list[Metrics], update: dict[str, Tensor], heads: tuple[str, ...]
) -> tuple[dict[str, float | None], int | None]:
    """Metrics of an update by name; one transfer from the device.

    Args:
        minibatches: metrics of each optimizer step.
        update: scalars of the update as a whole.
        heads: names of the action heads, for metrics of shape ``[heads]``.

    Returns:
        means over the minibatches (extremes for ratios and flags), and the index of the first
        minibatch that was refused, None if none was.
    """
    names, missing, table = metrics_table(minibatches, heads)
    extra = torch.stack([value.float() for value in update.values()])
    numbers = torch.cat([table.flatten(), extra]).tolist()
    columns = {name: numbers[i : table.numel() : len(names)] for i, name in enumerate(names)}
    summary: dict[str, float | None] = dict.fromkeys(missing)
    summary |= {name: sum(column) / len(column) for name, column in columns.items()}
    for name, reduce in ((Metric.RATIO_MAX, max), (Metric.RATIO_MIN, min), (Metric.REFUSED, max)):
        summary[name] = reduce(columns[name])
    summary[Metric.STOPPED] = columns[Metric.STOPPED][-1]
    summary[Metric.FIRST_KL] = columns[Metric.APPROX_KL][0]
    summary[Metric.FIRST_RATIO_MAX] = columns[Metric.RATIO_MAX][0]
    summary |= dict(zip(update, numbers[table.numel() :], strict=True))
    refusals = columns[Metric.REFUSED]
    return summary, refusals.index(1.0) if 1.0 in refusals else None


def metrics_table(
    minibatches: list[Metrics], heads: tuple[str, ...]
) -> tuple[list[str], set[str], Tensor]:
    """Names that all minibatches have, names that one lacks, and the former's values, a row each.

    A tensor ``[heads]`` is split into one scalar per head.
    """
    flat = [_scalars(metrics, heads) for metrics in minibatches]
    missing = {name for metrics in flat for name, value in metrics.items() if value is None}
    names = [name for name in flat[0] if name not in missing]
    table = torch.stack([torch.stack([m[name].float() for name in names]) for m in flat])
    return names, missing, table


def _scalars(metrics: Metrics, heads: tuple[str, ...]) -> Metrics:
    """The metrics, with each tensor ``[heads]`` split into one scalar per head."""
    flat: Metrics = {}
    for name, value in metrics.items():
        if value is not None and value.ndim:
            flat |= {part_metric(name, head): value[i] for i, head in enumerate(heads)}
        else:
            flat[name] = value
    return flat
