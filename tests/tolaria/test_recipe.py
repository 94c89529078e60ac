"""Recipes of tasks, trained hosts and resets."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from esper.kasmina.rng import Purpose, random_bits, to_integers
from esper.kasmina.seeds import SeedState
from esper.leyline.actions import BLUEPRINTS, HEADS
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.runtime.tasks import Pretraining, Task
from esper.tamiyo.policy.features import HOST_FEATURES
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows, trained_hosts
from support import (
    CPU,
    F64,
    Plant,
    assert_same_environment,
    backend_of,
    bank_of,
    naive_environments,
    seed_state,
    small_engine,
    small_environments,
    small_gpt,
    small_host,
    small_mlp,
    small_task,
    task_engine,
)

HOST = small_host()
LENGTH = 5
"""Steps of an episode of ``task_engine``."""


def test_cosine_decay_equals_the_scheduler_of_torch():
    # SGD: AdamW would amplify differences in the last bits of small gradients.
    task = replace(small_task(HOST), decay="cosine", momentum=0.9, max_gradient_norm=0.3)
    engine = task_engine(task)
    garden = [{0: Plant("conv_small"), 1: Plant("norm")}]
    state = seed_state(garden, 3)
    (naive,) = naive_environments(HOST, engine.stack, garden, engine.optimisation(0))
    optimizers = [naive.host_optimizer, *naive.seed_optimizers.values()]
    schedulers = [CosineAnnealingLR(optimizer, LENGTH) for optimizer in optimizers]
    for step in range(LENGTH):
        engine.train(state, step)
        bits = random_bits(3, torch.tensor([0]), Purpose.MINIBATCH, 0, step, 12)
        drawn = to_integers(bits, 40)[0]
        for picked in drawn.split(6):
            images = engine.bank.train_images[picked].permute(0, 3, 1, 2)
            naive.train(images, engine.bank.train_labels[picked])
        for scheduler in schedulers:
            scheduler.step()
    assert_same_environment(HOST, engine.stack, 0, naive)


def test_tasks_of_one_stack_decay_independently():
    constant = small_task(HOST)
    engine = task_engine(constant, replace(constant, decay="cosine"), groups=(0, 1), task_of=(0, 1))
    rates = [engine.optimisation(step).host_learning_rate.tolist() for step in range(LENGTH)]
    assert [constant for constant, _ in rates] == [5e-3] * LENGTH
    decayed = [decayed for _, decayed in rates]
    assert decayed[0] == 5e-3
    assert decayed == sorted(decayed, reverse=True)


def test_a_host_with_learning_rate_0_keeps_its_parameters_while_its_seed_learns():
    engine = task_engine(replace(small_task(HOST), host_learning_rate=0.0, weight_decay=0.1))
    state = seed_state([{0: Plant("conv_small", stage=Stage.BLENDING, alpha=0.5)}], 3)
    engine.germinate(state.alpha > 0, state.blueprint, 0)
    host, seed = engine.stack.host.clone(), engine.stack.seeds[0].clone()
    engine.train(state, 0)
    assert torch.equal(engine.stack.host, host)
    assert not torch.equal(engine.stack.seeds[0], seed)


@pytest.mark.parametrize(
    "change",
    [
        {"decay": "linear"},
        {"max_gradient_norm": 0.0},
        {"host_learning_rate": -1.0},
        {"deadline": 0.0},
        {"deadline": 1.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_recipe_out_of_range_is_rejected_with_its_field(change):
    (field,) = change
    with pytest.raises(UsageError, match=f"^{field}: .*'small'"):
        replace(small_task(HOST), **change)


# --- pretraining ------------------------------------------------------------------------

OTHER = small_task(HOST, seed=8)
PRETRAINING = Pretraining(OTHER.data, steps=3, learning_rate=1e-2, hosts=4)


def adapting(**changes) -> Task:
    return replace(small_task(HOST), pretraining=PRETRAINING, **changes)


def test_pretrained_hosts_are_those_of_an_episode_without_seeds_on_the_other_data():
    own = adapting(max_batches=2, batch_size=6, deadline=0.5)
    found = trained_hosts(own, backend_of(HOST, F64), F64, CPU)
    task = replace(OTHER, learning_rate=1e-2, decay="cosine")
    bank = DataBank([(task, task.datasets())], F64, CPU)
    identities = torch.arange(4)
    rows = Rows(identities, identities)
    engine = Engine(bank, rows, PRETRAINING.seed, backend_of(HOST, F64), 2, 6, 3)
    engine.reset(0)
    dormant = SeedState.dormant((4, len(HOST.slots)), CPU)
    initial = engine.stack.host.clone()
    for step in range(3):
        engine.train(dormant, step)
    assert torch.equal(found.parameters, engine.stack.host)
    assert torch.equal(found.buffers, engine.stack.buffers)
    assert not torch.equal(found.parameters, initial)


def test_each_group_starts_from_one_of_the_trained_hosts():
    engine = task_engine(adapting(), groups=tuple(range(40)), task_of=(0,) * 40)
    hosts = engine.bank.trained_hosts[0].parameters
    same = (engine.stack.host[:, None] == hosts).all(2)
    assert same.sum(1).tolist() == [1] * 40
    assert same.any(0).all()
    engine.reset(1)
    assert not torch.equal((engine.stack.host[:, None] == hosts).all(2), same)


def test_tasks_without_pretraining_start_from_initial_weights():
    mixed = task_engine(small_task(HOST), adapting(), groups=(0, 1, 2), task_of=(0, 1, 0))
    plain = task_engine(small_task(HOST), groups=(0, 1, 2), task_of=(0, 0, 0))
    assert torch.equal(mixed.stack.host[[0, 2]], plain.stack.host[[0, 2]])
    assert not torch.equal(mixed.stack.host[1], plain.stack.host[1])


def test_trained_hosts_are_shared_by_tasks_and_environments():
    backend = backend_of(HOST, F64)
    first = trained_hosts(adapting(), backend, F64, CPU)
    second = trained_hosts(adapting(learning_rate=0.5), backend, F64, CPU)
    assert first is second
    assert trained_hosts(small_task(HOST), backend, F64, CPU) is None


def test_environments_and_twins_of_a_group_start_from_the_same_trained_host():
    task = adapting(episode_length=3, max_batches=2, batch_size=6)
    env = small_environments([task], 8, seed=1, episode_length=3, max_batches=2, dtype=F64)
    env.reset(0)
    (shard,) = env.shards
    hosts, trained = shard.engine.stack.host, shard.engine.bank.trained_hosts[0].parameters
    for group in range(4):
        assert torch.equal(hosts[2 * group], hosts[2 * group + 1])
        assert torch.equal(hosts[2 * group], hosts[8 + group])
        assert (hosts[2 * group] == trained).all(1).any()


# --- deadline ---------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
def test_nothing_is_trained_from_the_deadline_on():
    task = small_task(HOST)
    engine = task_engine(task, replace(task, deadline=0.6), groups=(0, 1), task_of=(0, 1))
    state = seed_state([{0: Plant("conv_small", stage=Stage.BLENDING, alpha=0.5)}] * 2, 3)
    engine.germinate(state.alpha > 0, state.blueprint, 0)
    for step in range(LENGTH):
        before = [store.clone() for store in (engine.stack.host, engine.stack.seeds[0])]
        engine.train(state, step)
        for store, old in zip((engine.stack.host, engine.stack.seeds[0]), before, strict=True):
            learned = (store != old).any(1).tolist()
            assert learned == [True, step < 3]


def test_decay_ends_at_the_deadline():
    task = replace(small_task(HOST), decay="cosine")
    engine = task_engine(
        task, replace(task, deadline=0.6), replace(task, decay="constant", deadline=0.5),
        groups=(0, 1, 2), task_of=(0, 1, 2),
    )  # fmt: skip
    factors = torch.stack([engine.bank.rate_factors(step, LENGTH) for step in range(LENGTH)])
    steps = torch.arange(LENGTH, dtype=F64)

    def cosine(length: float) -> torch.Tensor:
        return (1.0 + (torch.pi * steps / length).cos()) / 2.0 * (steps < length)

    assert torch.allclose(factors[:, 0], cosine(LENGTH))
    assert torch.allclose(factors[:, 1], cosine(3.0))
    assert factors[:, 2].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_the_policy_observes_the_time_until_the_deadline():
    task = small_task(HOST)
    tasks = [replace(task, deadline=deadline) for deadline in (1.0, 0.5)]
    assignment = torch.arange(2)
    env = small_environments(
        tasks, 2, assignment=assignment, seed=1, episode_length=4, group_size=1
    )
    found = [env.reset(0).host]
    idle = torch.zeros(2, len(HEADS), dtype=torch.long)
    found += [env.step(idle).observation.host for _ in range(4)]
    column = HOST_FEATURES.index("remaining")
    assert [seen[:, column].tolist() for seen in found] == [
        [1.0, 0.5], [0.75, 0.25], [0.5, 0.0], [0.25, 0.0], [0.0, 0.0]
    ]  # fmt: skip


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
