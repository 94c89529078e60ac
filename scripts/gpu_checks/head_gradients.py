"""Gradient norms of the policy's heads in every precision (ticket B11-PT-01)."""

import math
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

from reporting import table

from esper.karn.store import read_events
from esper.leyline.actions import HEADS
from esper.leyline.config import unflatten
from esper.leyline.events import PPOUpdateCompleted
from esper.leyline.metrics import Metric, part_metric
from esper.simic.training.vectorized import run_training
from gpu_checks.place import FLOAT32, HALVES, TINY, Place, Row, attempted
from gpu_checks.section import Found, number


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per precision and head."""
    for precision in place.precisions:
        yield attempted({"precision": precision}, partial(norms, place, precision))


def norms(place: Place, precision: str) -> Row:
    """Return the median gradient norm of every head over a short training.

    Raises:
        RuntimeError: an update was refused, or a head had no gradient or one that is not finite.
    """
    half = precision in HALVES
    settings: dict[str, Any] = {
        "device": str(place.device),
        "compile": "off",
        "envs": place.size(64, 4),
        "rounds": place.size(3, 1),
        "use_amp": half,
        "amp_policy": half,
        "amp_dtype": precision if half else "auto",
        "tf32": precision != FLOAT32,
    }
    with tempfile.TemporaryDirectory() as folder:
        given = settings | place.size({}, TINY) | {"telemetry_dir": folder}
        run = run_training(unflatten(given), "ppo")
        updates = [update.metrics for update in read_events(run.path, PPOUpdateCompleted)]
    row: Row = {"refused": sum(float(update[Metric.REFUSED] or 0.0) for update in updates)}
    for head in (*HEADS, "value"):
        values = [update[part_metric(Metric.HEAD_GRAD_NORMS, head)] for update in updates]
        finite = [float(x) for x in values if x is not None and math.isfinite(float(x))]
        if len(finite) < len(values) or not finite:
            raise RuntimeError(f"{head}: gradient norms {values}")
        row[head] = statistics.median(finite)
    if row["refused"]:
        raise RuntimeError(f"{row['refused']:.0f} updates were refused")
    return row


def page(rows: list[Row], found: Found) -> str:
    """Return a row per head and a column per precision."""
    heads = ("head", *(row["precision"] for row in rows))
    lines = [
        (head, *(number(row.get(head)) if "error" not in row else "failed" for row in rows))
        for head in (*HEADS, "value")
    ]
    return table(heads, lines)
