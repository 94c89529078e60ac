"""Minibatches from page-locked memory beside data on the device: the same bits, at what speed?"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from hot_path_workload import Loop, Workload

from esper.simic.growth.step import GrowthConfig
from gpu_checks.place import TF32, Place, Row, attempted, computing
from gpu_checks.section import Found, rows_table

STEPS = 6
WAYS = {"on the device": True, "page-locked": False}


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per number of environments and place of the training images."""
    for envs in place.size((16, 64), (4,)):
        first: list[torch.Tensor] = []
        for way, preload in WAYS.items():
            row = {"envs": envs, "training images": way}
            yield attempted(row, partial(streamed, place, envs, preload, first))


def streamed(place: Place, envs: int, preload: bool, first: list[torch.Tensor]) -> Row:
    """Return speed of the steps, and whether hosts are those of the way before.

    Raises:
        RuntimeError: the images do not lie where they should.
    """
    growth = Workload.growth

    def placed(workload: Workload, backend: str) -> GrowthConfig:
        return replace(growth(workload, backend), preload=preload)

    sizes = {"task": "pixels", "max_batches": 2, "batch_size": place.size(64, 4)}
    with computing(TF32) as hosts, mock.patch.object(Workload, "growth", placed):
        loop = Loop(place.workload(envs, hosts, STEPS, **sizes), "torch")
        try:
            loop.begin()
            (bank,) = loop.environment.banks.values()
            if bank.streamed == preload:
                raise RuntimeError(f"streamed: {bank.streamed}")
            loop.play(place.size(STEPS, 4))
            host = loop.environment.shards[0].engine.stack.host.detach().cpu()
        finally:
            loop.close()
    row: Row = {
        "page-locked": bank.train_images.is_pinned() if bank.streamed else None,
        "step, ms": 1e3 * sum(loop.steps[1:]) / len(loop.steps[1:]),
    }
    if first:
        row["largest difference"] = float((host - first[0]).abs().max())
    first.append(host)
    return row


def page(rows: list[Row], found: Found) -> str:
    """Return the ways in Markdown."""
    names = ("envs", "training images", "page-locked", "step, ms", "largest difference")
    return rows_table(names, rows)
