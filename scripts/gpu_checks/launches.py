"""Kernel launches of a step and of a training minibatch, by environments and living seeds."""

from collections.abc import Iterator
from functools import partial

import torch
from hot_path_workload import Loop, Workload
from torch.profiler import ProfilerActivity, profile

from gpu_checks.place import TF32, Place, Row, attempted, computing
from gpu_checks.section import Found, rows_table

LAUNCHES = (
    *("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"),
    *("cudaMemcpyAsync", "cudaMemsetAsync"),
)
"""Beginnings of the names of calls that put work into a stream."""
STEPS = 9
"""Steps before the one that is counted: the seeds have germinated and are trained."""


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per number of environments and of slots with a seed."""
    for seeds in place.size((0, 1, 2), (1,)):
        for envs in place.size((64, 1024), (4, 12)):
            row = {"envs": envs, "slots with seeds": seeds}
            yield attempted(row, partial(counted, place, envs, seeds))


def counted(place: Place, envs: int, seeds: int) -> Row:
    """Return launches of a step of two minibatches, and of one minibatch more."""
    two, three = (of_a_step(place, envs, seeds, minibatches) for minibatches in (2, 3))
    return {"step of two minibatches": two, "one minibatch more": three - two}


def of_a_step(place: Place, envs: int, seeds: int, minibatches: int) -> int:
    """Return launches of one step, the policy's included."""
    with computing(TF32) as precision:
        workload = Workload(
            envs=envs,
            episode_length=STEPS + 2,
            max_batches=minibatches,
            batch_size=4,
            device=str(place.device),
            precision=precision,
            threads=1,
            seeds=seeds,
            synchronised=False,
        )
        loop = Loop(workload, "torch")
        try:
            loop.begin()
            loop.play(STEPS)
            return launched(place, loop)
        finally:
            loop.close()


def launched(place: Place, loop: Loop) -> int:
    """Return launches of the next step."""
    if place.machine is not None:
        before = sum(place.machine.launches.values())
        loop.step()
        return sum(place.machine.launches.values()) - before
    torch.cuda.synchronize(place.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        loop.step()
        torch.cuda.synchronize(place.device)
    found = [event for event in profiler.key_averages() if event.key.startswith(LAUNCHES)]
    if not found:
        raise RuntimeError("the profiler saw no launch; may this process trace the device?")
    return sum(event.count for event in found)


def page(rows: list[Row], found: Found) -> str:
    """Return the counts, and whether they depend on the number of environments."""
    names = ("envs", "slots with seeds", "step of two minibatches", "one minibatch more")
    by_seeds: dict[int, set[int]] = {}
    for row in rows:
        if "one minibatch more" in row:
            by_seeds.setdefault(row["slots with seeds"], set()).add(row["one minibatch more"])
    same = all(len(counts) == 1 for counts in by_seeds.values())
    text = "does not depend" if same else "DEPENDS"
    return (
        f"{rows_table(names, rows)}\n\nThe number of launches of a minibatch {text} on the number "
        "of environments."
    )
