"""Does mixed precision keep the accuracy of whole trainings, and how much faster are they?"""

import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import precision as trainings

from gpu_checks.place import HALVES, TINY, Place, Row, attempted
from gpu_checks.section import Found, rows_table

HOPED = 1.3, 1.5
"""Throughput under mixed precision that the user expects, as multiples of that without."""


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per seed and dtype, each with both trainings; those in TF32 are shared."""
    settings = {
        "task": "digits_shift",
        "device": str(place.device),
        "compile": "off",
        "envs": place.size(64, 4),
        "rounds": place.size(8, 1),
    }
    settings |= place.size({}, TINY)
    with tempfile.TemporaryDirectory() as folder:
        for seed in place.size((1, 2, 3), (1,)):
            for dtype in place.halves:
                row = {"seed": seed, "dtype": dtype}
                yield attempted(row, partial(compared, settings | {"seed": seed}, dtype, folder))


def compared(settings: dict[str, object], dtype: str, folder: str) -> Row:
    """Return final accuracies and seconds of two trainings, and their ratios."""
    found = trainings.compared(settings, dtype, Path(folder))
    plain, half = found["float32"], found[dtype]
    return {
        "accuracy in TF32": plain["final"],
        "accuracy": half["final"],
        "ratio of accuracy": found["ratio"],
        "gain in TF32": plain["gain"],
        "gain": half["gain"],
        "rolled back": half["rolled_back"],
        "ratio of throughput": plain["seconds"] / half["seconds"],
    }


def page(rows: list[Row], found: Found) -> str:
    """Return the trainings, and whether the ratios are what the user expects."""
    names = ("accuracy in TF32", "accuracy", "ratio of accuracy", "ratio of throughput", "gain")
    parts = [rows_table(("seed", "dtype", *names, "rolled back"), rows)]
    for dtype in HALVES:
        own = [row for row in rows if row["dtype"] == dtype and "ratio of accuracy" in row]
        if own:
            parts.append(verdict(dtype, own))
    return "\n\n".join(parts)


def verdict(dtype: str, rows: list[Row]) -> str:
    """Return a sentence with the medians of a dtype, and what they should be."""
    accuracy, throughput = (
        statistics.median(row[f"ratio of {what}"] for row in rows)
        for what in ("accuracy", "throughput")
    )
    kept = "at least" if accuracy >= trainings.MIN_RATIO else "LESS THAN"
    reached = "at least" if throughput >= HOPED[0] else "LESS THAN"
    return (
        f"{dtype}, median of {len(rows)}: final accuracy {accuracy:.3f} times that in TF32, {kept} "
        f"{trainings.MIN_RATIO}; throughput {throughput:.2f} times, {reached} {HOPED[0]} (the "
        f"user expects {HOPED[0]} to {HOPED[1]})."
    )
