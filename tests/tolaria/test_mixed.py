"""Torch computes exactly the environments that have a seed written only in Python."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from esper.kasmina.blueprints import Blueprint, register
from esper.kasmina.hosts.host import Host
from esper.kasmina.ops import conv2d
from esper.kasmina.stack import weight
from esper.leyline.actions import BLUEPRINTS
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.backends.native import MixedBackend, NativeBackend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision
from support import (
    CPU,
    F64,
    LIVES,
    Garden,
    Plant,
    assert_identical,
    copied,
    minibatches,
    needs_native,
    optimisation,
    own_blueprints,
    random_batches,
    random_stack,
    row_of,
    seed_state,
    small_engine,
    small_host,
)

pytestmark = needs_native

OWN = "plain"
FOREIGN = (1, 4)
GARDEN: Garden = [
    {0: Plant("conv_light", **LIVES["blending"])},
    {1: Plant(OWN, **LIVES["blending"]), 2: Plant("attention", **LIVES["training"])},
    {},
    {0: Plant("depthwise", **LIVES["holding"]), 2: Plant("norm", **LIVES["training"])},
    {0: Plant(OWN, **LIVES["training"]), 1: Plant(OWN, **LIVES["holding"])},
]
"""Environments 1 and 4 have seeds that the library does not know."""


def plain(channels: int) -> Blueprint:
    """A 1x1 convolution."""
    fields = (weight("weight", channels, channels, 1, 1),)
    return Blueprint(fields, lambda p, x: conv2d(x, p["weight"]))


@pytest.fixture
def host() -> Iterator[Host]:
    """A host whose slots also accept the Python blueprint."""
    with own_blueprints():
        register(OWN, plain)
        yield small_host()


def backends(host: Host) -> tuple[MixedBackend, TorchBackend, NativeBackend]:
    others = TorchBackend(host, Precision("cpu"))
    return MixedBackend(NativeBackend(host, F64), others), others, NativeBackend(host, F64)


def test_environments_whose_seeds_are_all_known_train_natively(host: Host) -> None:
    state = seed_state(GARDEN, 3)
    seeds, rows = Seeds.training(state), len(GARDEN)
    batches = minibatches(random_batches(host, rows))
    ways = torch.tensor([0, 1, 2, 2, 1])
    rates = replace(optimisation(rows, 3), tuning=ways)
    mixed, others, native = backends(host)
    start = random_stack(host, rows)
    found, by_torch, by_native = (copied(start) for _ in range(3))
    result = mixed.train_epoch(found, seeds, batches, rates)
    expected = others.train_epoch(by_torch, seeds, batches, rates)
    foreign = torch.zeros(rows, 1, dtype=torch.bool)
    foreign[list(FOREIGN)] = True
    known = replace(seeds, computed=seeds.computed & ~foreign)
    alone = native.train_epoch(by_native, known, batches, rates)
    for n in range(rows):
        one, other = row_of(found, n), row_of(by_torch, n)
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-9)
        if n not in FOREIGN:
            assert_identical(one, row_of(by_native, n))
            assert result.loss[n] == alone.loss[n]
        assert not torch.equal(found.host[n], start.host[n])
    for name in ("loss", "accuracy", "host_gradient_norm", "seed_gradient_norm"):
        one, other = getattr(result, name), getattr(expected, name)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
    for one, other in zip(result.seed_tensor_norms, expected.seed_tensor_norms, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("shared", [False, True])
def test_validation_and_ablation_match_torch(host: Host, shared: bool) -> None:
    state = seed_state(GARDEN, 3)
    engine = small_engine(host, len(GARDEN), groups=[0] * 5 if shared else None)
    engine.stack = random_stack(host, len(GARDEN))
    mixed, others, _ = backends(host)
    engine.backend = others
    expected = engine.measure(state, 0, committed=True)
    engine.backend = mixed
    found = engine.measure(state, 0, committed=True)
    torch.testing.assert_close(found.contribution, expected.contribution, equal_nan=True)
    assert found.contribution[1, 1].isfinite()
    for one, other in ((found.scores, expected.scores), (found.committed, expected.committed)):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.expected, other.expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [(1, 4), (0, 2)])
def test_one_backend_computes_a_uniform_stack(host: Host, rows: tuple, monkeypatch) -> None:
    mixed, others, native = backends(host)

    def refused(*_: object) -> None:
        raise AssertionError("the other one was asked")

    idle = mixed.native if rows == FOREIGN else mixed.fallback
    monkeypatch.setattr(idle, "train_epoch", refused)
    mine = [GARDEN[n] for n in rows]
    stack, seeds = random_stack(host, 2), Seeds.training(seed_state(mine, 3))
    twin, inputs = copied(stack), (minibatches(random_batches(host, 2)), optimisation(2, 3))
    mixed.train_epoch(stack, seeds, *inputs)
    (others if rows == FOREIGN else native).train_epoch(twin, seeds, *inputs)
    for n in range(2):
        assert_identical(row_of(stack, n), row_of(twin, n))


def test_choosing_the_mixed_backend_logs_one_line(host: Host, caplog) -> None:
    made = [choose_backend("auto", host, Precision("cpu"), F64, CPU) for _ in range(2)]
    assert all(isinstance(backend, MixedBackend) for backend in made)
    assert made[0].native.kind_of[BLUEPRINTS.index(OWN)] == -1
    (line,) = caplog.messages
    assert OWN in line
    assert line.endswith("hosts with such a seed use torch")
