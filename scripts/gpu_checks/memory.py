"""What a row takes by the trial that cuts rows, and what whole loops take."""

from collections.abc import Iterator
from functools import partial

import torch
from hot_path_workload import Loop

from esper.runtime.tasks import find
from esper.tolaria.memory import row_memory
from gpu_checks.place import TF32, Place, Row, attempted, computing
from gpu_checks.section import Found, rows_table

STEPS = 8
MIB = 2**20


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per task, precision and number of environments."""
    real = (("digits_shift", 64), ("pixels", 16), ("digits_shift", 1024), ("pixels", 128))
    for task, envs in place.size(real, (("digits_shift", 8),)):
        for precision in place.size((TF32, place.halves[0]), (TF32,)):
            row = {"task": task, "precision": precision, "envs": envs}
            yield attempted(row, partial(taken, place, task, precision, envs))


def taken(place: Place, task: str, precision: str, envs: int) -> Row:
    """Return bytes of a row by the trial, and those that a loop takes for each of its rows."""
    device = place.device
    with computing(precision) as hosts:
        batch_size = place.size(find(task).batch_size, 4)
        trial = row_memory(find(task).host, hosts, torch.float32, device, batch_size)
        sizes = {"max_batches": 1, "batch_size": batch_size}
        workload = place.workload(envs, hosts, STEPS, task=task, **sizes)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loop = Loop(workload, "torch")
        try:
            loop.begin()
            loop.play_episode()
        finally:
            loop.close()
        peak = torch.cuda.max_memory_allocated(device) - before
        rows = sum(len(shard.engine.rows) for shard in loop.environment.shards)
        return {
            "rows": rows,
            "parts": len(loop.environment.parts),
            "trial, MiB a row": (trial.active + trial.stored) / MIB,
            "loop, MiB a row": peak / rows / MIB,
            "loop, GiB": peak / 2**30,
            "reserved, GiB": torch.cuda.max_memory_reserved(device) / 2**30,
        }


def page(rows: list[Row], found: Found) -> str:
    """Return the memory in Markdown."""
    names = ("rows", "parts", "trial, MiB a row", "loop, MiB a row", "loop, GiB", "reserved, GiB")
    return (
        "The trial has the largest seed in every slot, the loop a small one in the first.\n\n"
        f"{rows_table(('task', 'precision', 'envs', *names), rows)}"
    )
