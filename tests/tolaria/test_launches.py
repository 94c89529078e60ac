"""The launches of a training minibatch on a device do not depend on the number of environments."""

from functools import cache

import pytest
import torch

from esper.kasmina.seeds import SeedState
from esper.leyline.actions import Style
from esper.runtime.tasks import find
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows
from esper.tolaria.precision import Precision
from support import LIVES, Garden, Plant, seed_state, small_task
from virtual_device import virtual_device

GPU = torch.device("cuda:0")
BARE: Garden = [{}]
ONE: Garden = [{0: Plant("conv_heavy", **LIVES["blending"])}]
MIXED: Garden = [
    {0: Plant("conv_heavy"), 1: Plant("conv_light", Style.GATED_GATE, **LIVES["training"])},
    {0: Plant("norm", Style.LINEAR_MULTIPLY, **LIVES["blending"]), 1: Plant("attention")},
    {0: Plant("conv_small", **LIVES["on the way down"]), 1: Plant("depthwise")},
    {1: Plant("bottleneck", **LIVES["holding"])},
]


@cache
def launches(kind: int, count: int, minibatches: int) -> int:
    """Kernels of an epoch of so many environments, of which all garden rows are repeated."""
    garden = ((BARE, ONE, MIXED)[kind] * count)[:count]
    task = small_task(find("digits_shift").host)
    with virtual_device() as machine:
        rows = torch.arange(count).to(GPU)
        backend = TorchBackend(task.host, Precision("cuda"))
        bank = DataBank([(task, task.datasets())], torch.float32, GPU)
        engine = Engine(bank, Rows(rows, rows // 8), 0, backend, minibatches, 4)
        engine.reset(0)
        host = seed_state(garden, len(task.host.slots))
        state: SeedState = host.map(lambda x: x.to(GPU))
        engine.train(state, 0, host)  # the first epoch also fills caches
        machine.launches.clear()
        machine.syncs.clear()
        engine.train(state, 0, host)
        assert not machine.syncs
        assert machine.faults == []
        return sum(machine.launches.values())


def of_a_minibatch(kind: int, count: int) -> int:
    # The last minibatch also measures the slots: a difference of two epochs leaves it out.
    return launches(kind, count, 3) - launches(kind, count, 2)


@pytest.mark.parametrize("kind", range(3), ids=["no seeds", "one blueprint", "seven blueprints"])
def test_more_environments_take_no_more_launches(kind: int, record_property) -> None:
    counts = {count: of_a_minibatch(kind, count) for count in (16, 64, 256)}
    record_property("launches", counts)
    print(counts)
    assert counts[16] == counts[64] == counts[256]
    assert counts[16] < (130, 320, 1300)[kind]


@pytest.mark.parametrize("kind", range(3), ids=["no seeds", "one blueprint", "seven blueprints"])
def test_measuring_the_slots_of_more_environments_takes_no_more_launches(kind: int) -> None:
    """An epoch of one minibatch, in which the empty slots are measured from half of it."""
    counts = {count: launches(kind, count, 1) for count in (16, 64, 256)}
    measuring = counts[16] - of_a_minibatch(kind, 16)
    print(counts, measuring)
    assert counts[16] == counts[64] == counts[256]
    assert 0 < measuring < 250
