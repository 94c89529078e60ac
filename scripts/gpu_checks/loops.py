"""Whole training loops by number of environments, precision of the hosts, and capture."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from hot_path_workload import Loop
from reporting import table

from gpu_checks.place import FLOAT32, PRECISIONS, TF32, Place, Row, attempted, computing
from gpu_checks.section import Found, number, rows_table

COUNTS, FEW = (16, 64, 256, 1024, 4096), (4,)
"""Numbers of environments; small ones first, which no missing engine of cuDNN ends."""


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per loop."""
    ways = [(True, name) for name in (TF32, place.halves[0], FLOAT32)] + [(False, TF32)]
    for envs, (captured, precision) in product(place.size(COUNTS, FEW), ways):
        row = {"envs": envs, "precision": precision, "captured": captured}
        yield attempted(row, partial(speed, place, envs, precision, captured))


def speed(place: Place, envs: int, precision: str, captured: bool) -> Row:
    """Return environment steps a second of one episode with its update, after another."""
    with computing(precision) as hosts:
        mode = "default" if captured else "off"
        workload = place.workload(envs, hosts, 12, compile_mode=mode)
        torch.cuda.reset_peak_memory_stats(place.device)
        loop = Loop(workload, "torch")
        # What is captured is not compiled as well: that takes a minute for each loop.
        loop.agent.compiled.active = False
        try:
            loop.begin()
            loop.play_episode()
            loop.begin()
            loop.clear()
            loop.play_episode()
        finally:
            loop.close()
        steps = envs * workload.episode_length
        return {
            "steps a second": steps / loop.seconds,
            "step, ms": 1e3 * sum(loop.steps) / len(loop.steps),
            "of it hosts, ms": 1e3 * loop.host / len(loop.steps),
            "update, ms": 1e3 * loop.update,
            "parts": len(loop.environment.parts),
            "peak, GiB": torch.cuda.max_memory_allocated(place.device) / 2**30,
        }


def page(rows: list[Row], found: Found) -> str:
    """Return the loops, and what half precision gains in throughput."""
    names = ("envs", "precision", "captured", "steps a second", "step, ms", "of it hosts, ms")
    whole = rows_table((*names, "update, ms", "parts", "peak, GiB"), sorted(rows, key=order))
    ratios = throughput(rows)
    heads = ("envs", "captured", "bfloat16 / TF32", "float16 / TF32", "TF32 / float32")
    lines = [(envs, captured, *map(number, parts)) for envs, captured, *parts in ratios]
    return f"{whole}\n\nRatios of throughput:\n\n{table(heads, lines)}"


def order(row: Row) -> tuple[int, int, bool]:
    """Return the place of a row in the table."""
    return row["envs"], PRECISIONS.index(row["precision"]), not row["captured"]


def throughput(rows: list[Row]) -> list[tuple[int, bool, *tuple[float | None, ...]]]:
    """Return ratios of environment steps a second, by environments and capture."""
    speeds = {(r["envs"], r["captured"], r["precision"]): r.get("steps a second") for r in rows}

    def ratio(envs: int, captured: bool, name: str, base: str) -> float | None:
        one, other = speeds.get((envs, captured, name)), speeds.get((envs, captured, base))
        return None if one is None or other is None else one / other

    pairs = (("bfloat16", TF32), ("float16", TF32), (TF32, "float32"))
    return [
        (envs, captured, *(ratio(envs, captured, *pair) for pair in pairs))
        for envs, captured in sorted({(r["envs"], r["captured"]) for r in rows})
    ]
