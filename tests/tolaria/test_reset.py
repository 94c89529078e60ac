"""An episode begins alike, whatever happened before it."""

from itertools import combinations

import pytest
import torch

from esper.leyline.actions import BLUEPRINTS
from esper.tolaria.engine import Engine, Rows
from support import (
    F64,
    backend_of,
    bank_of,
    small_engine,
    small_gpt,
    small_host,
    small_mlp,
    small_task,
)


@pytest.mark.parametrize(
    "host", [small_host(), small_mlp(), small_gpt()], ids=["cnn", "mlp", "gpt"]
)
def test_nothing_of_an_earlier_episode_survives(host) -> None:
    used, new = small_engine(host, 3), small_engine(host, 3)
    for store in used.stack.stores():
        store.fill_(7)
    for engine in (used, new):
        engine.reset(1)
    for own, expected in zip(used.stack.stores(), new.stack.stores(), strict=True):
        assert torch.equal(own, expected)


def born(seed: int = 3, episode: int = 0, step: int = 2) -> Engine:
    """An engine of two groups, of two environments and of one, with a seed in each slot."""
    host = small_host()
    rows = Rows(torch.arange(3), torch.tensor([0, 0, 1]))
    engine = Engine(bank_of(small_task(host)), rows, seed, backend_of(host, F64), 3, 6)
    engine.reset(episode)
    everywhere = torch.ones(3, len(host.slots), dtype=torch.bool)
    kind = torch.full(everywhere.shape, BLUEPRINTS.index("conv_light"))
    engine.germinate(everywhere, kind, step)
    return engine


def drawn(values: torch.Tensor) -> torch.Tensor:
    """The columns whose initial values are random."""
    return values[:, values.std(0) > 0]


def test_every_birth_draws_its_own_weights() -> None:
    first = born().stack.seeds
    assert all(torch.equal(a, b) for a, b in zip(first, born().stack.seeds, strict=True))
    for other in (born(seed=4), born(episode=1), born(step=3)):
        assert all(
            not torch.isin(drawn(own), theirs).any()
            for own, theirs in zip(first, other.stack.seeds, strict=True)
        )
    one, another = drawn(first[0]), drawn(first[1])
    assert one.shape == another.shape, "the first two slots have the same channels"
    assert not torch.isin(one, another).any()
    assert not any(torch.isin(one[a], one[b]).any() for a, b in combinations(range(3), 2))
    assert abs(float((one < 0).double().mean()) - 0.5) < 0.2


def test_every_host_of_a_group_begins_alike_and_no_other() -> None:
    first = born().stack.host
    assert torch.equal(first[0], first[1])
    random = drawn(first)
    assert not torch.isin(random[0], random[2]).any()
    for other in (born(seed=4), born(episode=1)):
        assert not torch.isin(random, other.stack.host).any()
    assert torch.equal(first, born(step=3).stack.host)
    assert abs(float((random < 0).double().mean()) - 0.5) < 0.2


def test_a_newborn_does_not_inherit_the_moments_of_a_dead_seed() -> None:
    engine = born()
    for optimizer in engine.stack.seed_optimizers:
        for part in (optimizer.first, optimizer.second, optimizer.step):
            part.fill_(7)
    where = torch.tensor([[True, False, False], [False, False, True], [False, False, False]])
    engine.germinate(where, torch.full((3, 3), BLUEPRINTS.index("norm")), 4)
    for s, optimizer in enumerate(engine.stack.seed_optimizers):
        for part in (optimizer.first, optimizer.second, optimizer.step):
            assert torch.equal(part.reshape(3, -1).eq(0).all(1), where[:, s])
            assert torch.equal(part.reshape(3, -1).eq(7).all(1), ~where[:, s])
