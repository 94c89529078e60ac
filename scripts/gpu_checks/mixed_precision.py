"""Does mixed precision keep the accuracy of whole trainings, and how much faster are they?

Half precision is faster where arithmetic is the bound: on hosts for CIFAR-10 in large numbers. On
few tiny hosts a step is a sequence of launches, which take as long in any precision.
"""

import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import precision as trainings
from hot_path_workload import Loop

from gpu_checks.place import HALVES, TF32, TINY, Place, Row, attempted, computing
from gpu_checks.section import Found, rows_table

BACKENDS = "torch", "triton"
"""The second needs a real GPU."""
HOPED = 1.3, 1.5
"""Throughput under mixed precision that the user expects, as multiples of that without."""


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per loop on CIFAR hosts."""
    ways = product(
        place.size((256, 512), (2,)), place.size(BACKENDS, BACKENDS[:1]), (TF32, *place.halves)
    )
    for envs, backend, name in ways:
        row = {"envs": envs, "backend": backend, "precision": name}
        yield attempted(row, partial(speed, place, envs, backend, name))


def measure_accuracy(place: Place) -> Iterator[Row]:
    """Yield a row per seed and dtype, each with both trainings; those in TF32 are shared."""
    settings: dict[str, Any] = {
        "task": "digits_shift",
        "device": str(place.device),
        "compile": "off",
        "envs": place.size(64, 4),
        "rounds": place.size(2, 1),
    }
    settings |= place.size({}, TINY)
    with tempfile.TemporaryDirectory() as folder:
        for seed in place.size((1, 2), (1,)):
            for dtype in place.halves:
                row = {"seed": seed, "dtype": dtype}
                yield attempted(row, partial(compared, settings | {"seed": seed}, dtype, folder))


def speed(place: Place, envs: int, backend: str, precision: str) -> Row:
    """Return milliseconds of a step of CIFAR hosts of 8-16-32 channels in a precision.

    Triton's kernels are compiled in an episode of their own.
    """
    with computing(precision) as hosts:
        sizes = {"task": "pixels", "max_batches": place.size(4, 1), "batch_size": place.size(64, 4)}
        loop = Loop(place.workload(envs, hosts, 6, **sizes), backend)
        try:
            for _ in range(1 + (backend == BACKENDS[1])):
                loop.begin()
                loop.clear()
                loop.play(place.size(6, 4))
        finally:
            loop.close()
    return {"step, ms": 1e3 * statistics.median(loop.steps[1:])}


def compared(settings: dict[str, object], dtype: str, folder: str) -> Row:
    """Return final accuracies of two trainings, and their ratio."""
    found = trainings.compared(settings, dtype, Path(folder))
    plain, half = found["float32"], found[dtype]
    return {
        "accuracy in TF32": plain["final"],
        "accuracy": half["final"],
        "ratio of accuracy": found["ratio"],
        "rolled back": half["rolled_back"],
    }


def page(rows: list[Row], found: Found) -> str:
    """Return the loops, and whether the ratios are what the user expects."""
    parts = [rows_table(("envs", "backend", "precision", "step, ms"), rows)]
    for backend in BACKENDS:
        loops = [row for row in rows if row.get("backend", BACKENDS[0]) == backend]
        parts += [throughput(loops, backend, dtype) for dtype in HALVES]
    return "\n\n".join(part for part in parts if part)


def accuracy_page(rows: list[Row], found: Found) -> str:
    """Return the trainings, and whether the ratios are what the user expects."""
    names = ("accuracy in TF32", "accuracy", "ratio of accuracy", "rolled back")
    parts = [rows_table(("seed", "dtype", *names), rows)]
    for dtype in HALVES:
        ratios = [r["ratio of accuracy"] for r in rows if r["dtype"] == dtype and names[2] in r]
        if ratios:
            parts.append(accuracy(dtype, ratios))
    return "\n\n".join(parts)


def throughput(loops: list[Row], backend: str, dtype: str) -> str:
    """Return a sentence with the ratios of throughput of a dtype by number of environments.

    ``loops`` are those of ``backend``.
    """
    times = {(row["envs"], row["precision"]): row.get("step, ms") for row in loops}
    ratios = {
        envs: plain / half
        for (envs, name), half in times.items()
        if name == dtype and half and (plain := times.get((envs, TF32)))
    }
    if not ratios:
        return ""
    shown = ", ".join(f"{ratio:.2f} at {envs}" for envs, ratio in ratios.items())
    reached = "reached" if max(ratios.values()) >= HOPED[0] else "NOT REACHED"
    return (
        f"With {backend}, {dtype} is {shown} environments times as fast as TF32; {HOPED[0]} is "
        f"{reached}."
    )


def accuracy(dtype: str, ratios: list[float]) -> str:
    """Return a sentence with the median ratio of accuracy of a dtype, and what it should be."""
    median = statistics.median(ratios)
    kept = "at least" if median >= trainings.MIN_RATIO else "LESS THAN"
    return (
        f"{dtype}, median of {len(ratios)}: final accuracy {median:.3f} times that in TF32, {kept} "
        f"{trainings.MIN_RATIO}."
    )
