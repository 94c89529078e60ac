"""Operations and launches of a step do not depend on the number of environments."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.seeds import SeedState
from esper.leyline.actions import Style
from esper.runtime.tasks import find
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows
from esper.tolaria.plan import CHUNK
from esper.tolaria.precision import Precision
from support import LIVES, Garden, OperationCounter, Plant, bank_of, seed_state, small_task
from virtual_device import virtual_device

COMPOSITION: Garden = [
    {0: Plant("conv_heavy"), 1: Plant("conv_light", Style.GATED_GATE, **LIVES["training"])},
    {0: Plant("norm", Style.LINEAR_MULTIPLY, **LIVES["blending"]), 1: Plant("attention")},
    {0: Plant("conv_heavy", **LIVES["on the way down"])},
    {1: Plant("bottleneck", **LIVES["holding"])},
]
"""Both slots, all forms, isolated and not, frozen and not, empty slots."""

MLP_COMPOSITION: Garden = [
    {0: Plant("mlp"), 1: Plant("mlp_small", Style.GATED_GATE, **LIVES["training"])},
    {0: Plant("mlp_small", Style.LINEAR_MULTIPLY, **LIVES["blending"])},
]


@dataclass(frozen=True)
class Operations:
    """Operations that reached the dispatcher: all, and those that are not views."""

    dispatched: int
    computing: int


@cache
def operations(names: tuple[int, ...], mlp: bool = False) -> Operations:
    """Operations of one training epoch and one measurement; ``names`` index the composition.

    Counts the second call, because the first also fills caches of the device.
    """
    _counted(names, mlp)
    return _counted(names, mlp)


def _counted(names: tuple[int, ...], mlp: bool) -> Operations:
    composition = MLP_COMPOSITION if mlp else COMPOSITION
    host = MlpHost((4, 8), 10, (8, 8, 1)) if mlp else find("digits_shift").host
    return counted(host, [composition[i] if i >= 0 else {} for i in names])


def counted(host: Host, garden: Garden) -> Operations:
    """Operations of one training epoch and one measurement of a garden."""
    rows = torch.arange(len(garden))
    bank, backend = bank_of(small_task(host), torch.float32), TorchBackend(host, Precision("cpu"))
    engine = Engine(bank, Rows(rows, rows // 8), 0, backend, max_batches=1, batch_size=4)
    engine.reset(0)
    state = seed_state(garden, len(host.slots))
    engine.germinate(state.living, state.blueprint, step=0)
    with OperationCounter() as counter:
        engine.train(state, step=0)
        engine.measure(state, 0, committed=True)
    return Operations(counter.dispatched, counter.computing)


def test_more_environments_take_no_more_operations():
    few = operations((0, 0, 1, 1))
    assert few.computing > 100
    assert operations((0, 1) * 6) == few
    assert operations((0, 1, -1) * 4) == few
    assert operations((-1,) * 4) == operations((-1,) * 12) == operations((-1,) * 64)
    assert operations((-1,) * 4).computing < few.computing


def test_more_mlps_take_no_more_operations():
    few = operations((0, 0, 1, 1), mlp=True)
    assert operations((0, 1) * 6, mlp=True) == operations((0, 1, -1) * 4, mlp=True) == few
    bare = operations((-1,) * 4, mlp=True)
    assert operations((-1,) * 64, mlp=True) == bare
    assert bare.computing < few.computing


def test_operations_depend_on_living_kinds_not_on_the_mix_of_environments():
    all_kinds = operations((0, 1, 2, 3) * 2)
    assert operations((0, 1, 2, 3) * 3) == all_kinds
    assert operations((0, 0, 0, 1, 1, 2, 2, 3, 3, -1, -1, 3)) == all_kinds
    assert operations((0, 1, 2) * 2).computing < all_kinds.computing


def test_a_single_seed_of_a_kind_takes_no_more_operations_than_many():
    """It takes fewer: flattening a single row needs no copy, which saves clones of parameters."""
    alone, many = operations((0, 1, 2, 3)), operations((0, 1, 2, 3) * 3)
    assert alone.dispatched <= many.dispatched
    assert 0.95 * many.dispatched < alone.dispatched


@pytest.mark.parametrize("name", range(len(COMPOSITION)))
def test_operations_grow_only_with_the_number_of_chunks(name: int):
    """A single chunk differs from one of many by a few views, because nothing is split."""
    one, two, three, four = (operations((name,) * chunks * CHUNK) for chunks in (1, 2, 3, 4))
    assert operations((name,) * 4) == one
    assert three.computing - two.computing == two.computing - one.computing
    assert four.computing - three.computing == three.computing - two.computing
    assert four.dispatched - three.dispatched == three.dispatched - two.dispatched
    assert abs((three.dispatched - two.dispatched) - (two.dispatched - one.dispatched)) <= 6
    assert two.dispatched - one.dispatched < 0.5 * one.dispatched
    assert operations((name,) * (CHUNK + 2)) == two
    # Six chunks, the last of four rows.
    many = operations((name,) * 64)
    assert many.dispatched - two.dispatched == 4 * (three.dispatched - two.dispatched)


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
    counts = {count: of_a_minibatch(kind, count) for count in (16, 256)}
    record_property("launches", counts)
    print(counts)
    assert counts[16] == counts[256]
    assert counts[16] < (130, 320, 1300)[kind]


@pytest.mark.parametrize("kind", range(3), ids=["no seeds", "one blueprint", "seven blueprints"])
def test_measuring_the_slots_of_more_environments_takes_no_more_launches(kind: int) -> None:
    """An epoch of one minibatch, in which the empty slots are measured from half of it."""
    counts = {count: launches(kind, count, 1) for count in (16, 256)}
    measuring = counts[16] - of_a_minibatch(kind, 16)
    print(counts, measuring)
    assert counts[16] == counts[256]
    assert 0 < measuring < 250
