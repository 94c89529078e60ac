"""Data of several tasks, and shifts of channels."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.hosts.host import NormedHost
from esper.kasmina.rng import Purpose, random_bits
from esper.kasmina.seeds import SeedState
from esper.leyline.actions import BLUEPRINTS, HEADS
from esper.leyline.errors import UsageError
from esper.leyline.stages import LIVING, Stage
from esper.runtime.data import Dataset
from esper.runtime.task import ChannelShift, Drift, Task
from esper.tolaria.bank import DataBank, StackKey
from esper.tolaria.governor import Governor
from support import (
    CPU,
    F64,
    assert_identical,
    bank_of,
    random_stack,
    row_of,
    small_environments,
    small_gpt,
    small_host,
    small_mlp,
    small_task,
    task_engine,
)

HOST = small_host()


def plain(level: float, train: int = 20, validation: int = 13, test: int = 7) -> Dataset:
    """Data whose images have distinct values around ``level``; labels cycle through classes."""

    def split(count: int) -> tuple[Tensor, Tensor]:
        values = level + torch.arange(count, dtype=F64) / 1024
        images = values[:, None, None, None].expand(count, *HOST.image).clone()
        return images, torch.arange(count) % HOST.classes

    return Dataset(*split(train), *split(validation), *split(test), classes=HOST.classes)


def task_of(data: Dataset, **changes) -> Task:
    return replace(small_task(HOST), data=lambda: data, **changes)


def drifting(never: float = 0.25, earliest: float = 0.2, latest: float = 0.8) -> Task:
    before, after = plain(1.0), plain(-2.0, train=33)
    return task_of(before, drift=Drift(lambda: after, earliest, latest, never))


def banked(*tasks: Task) -> DataBank:
    return DataBank([(task, task.datasets()) for task in tasks], F64, CPU)


def test_converting_the_dtype_leaves_labels_unchanged():
    data = plain(1.0)
    bank = DataBank([(task_of(data), [data])], torch.float32, CPU)
    for split in ("train", "validation", "test"):
        images, labels = getattr(bank, f"{split}_images"), getattr(bank, f"{split}_labels")
        assert images.dtype == torch.float32
        assert labels.dtype == torch.long
        assert torch.equal(images.double().flatten(), getattr(data, f"{split}_images").flatten())


# --- shared stacks ----------------------------------------------------------------------


def test_tasks_share_a_stack_exactly_if_shapes_and_decay_agree():
    def key(task: Task) -> StackKey:
        return StackKey.of(task, task.datasets())

    data = plain(1.0)
    base = key(task_of(data))
    alike = [
        task_of(plain(5.0, train=99)),
        task_of(data, learning_rate=0.5),
        task_of(data, drift=Drift(lambda: plain(2.0), 0.0, 1.0, 0.5)),
    ]
    for task in alike:
        assert key(task) == base
    wider = small_host(channels=(3, 6))
    others = [
        task_of(plain(1.0, validation=14)),
        task_of(plain(1.0, test=8)),
        task_of(data, weight_decay=0.0),
        task_of(data, host=small_host(slot_names=("r0c0",))),
        task_of(data, host=wider),
    ]
    for task in others:
        assert key(task) != base


@pytest.mark.parametrize("sizes", [{"validation": 14}, {"test": 8}])
def test_a_drift_that_changes_held_back_sizes_is_rejected(sizes: dict[str, int]):
    task = task_of(plain(1.0), drift=Drift(lambda: plain(2.0, **sizes), 0.0, 1.0, 0.5))
    with pytest.raises(UsageError, match=r"^drift: .*make them the same"):
        StackKey.of(task, task.datasets())


# --- minibatches and held-back sets -----------------------------------------------------------


def test_each_group_draws_from_all_of_its_own_data_set():
    first, second, third = plain(1.0, train=20), plain(2.0, train=5), plain(3.0, train=31)
    bank = banked(task_of(first), task_of(second), task_of(third))
    groups, dataset = torch.arange(6), torch.tensor([0, 1, 2, 2, 1, 0])
    drawn = bank.samples(random_bits(3, groups, Purpose.MINIBATCH, 0, 0, 600), dataset)
    images, labels = bank.train_images[drawn], bank.train_labels[drawn]
    for group, data in enumerate((first, second, third, third, second, first)):
        values = data.train_images[:, 0, 0, 0].contiguous()
        found = images[group, :, 0, 0, 0].contiguous()
        place = torch.searchsorted(values, found)
        assert torch.equal(values[place], found)
        assert torch.equal(labels[group], data.train_labels[place])
        assert torch.bincount(place, minlength=len(values)).min() > 0  # every image is drawn
    assert not torch.equal(drawn[2], drawn[3])
    alone = random_bits(3, groups[2:3], Purpose.MINIBATCH, 0, 0, 600)
    assert torch.equal(bank.samples(alone, dataset[2:3]), drawn[2:3])


@pytest.mark.parametrize("split", ["validation", "test"])
def test_each_row_gets_its_own_held_back_set(split: str):
    sets = [plain(1.0), plain(2.0), plain(3.0)]
    bank = banked(*(task_of(data) for data in sets))
    rows = torch.tensor([2, 0, 0, 1])
    images, labels = bank.held_back(split, rows).by_row()
    for row, data in enumerate(rows.tolist()):
        assert torch.equal(images[:, :, :, row], getattr(sets[data], f"{split}_images"))
        assert torch.equal(labels[row], getattr(sets[data], f"{split}_labels"))


def test_a_data_set_is_stored_once_and_shared_by_all_rows():
    data = plain(1.0)
    bank = banked(task_of(data), task_of(data, learning_rate=0.5))
    assert len(bank.train_images) == 20
    images, labels = bank.held_back("validation", torch.zeros(8, dtype=torch.long)).by_row()
    assert images.shape == (13, *HOST.image[:2], 1, HOST.image[2])
    assert torch.equal(images[:, :, :, 0], data.validation_images)
    assert torch.equal(labels, data.validation_labels[None])
    assert bank.seed_rates.tolist() == [5e-3, 0.5]
    back = banked(task_of(data), task_of(plain(2.0), drift=Drift(lambda: data, 0.0, 1.0, 0.5)))
    assert len(back.validation_images) == 2
    assert (back.before.tolist(), back.after.tolist()) == ([0, 1], [0, 0])


# --- drift ------------------------------------------------------------------------------------


def test_drifts_happen_in_their_window_or_never():
    bank, groups, length = bank_of(drifting(never=0.25)), torch.arange(4_000), 40
    task = torch.zeros_like(groups)
    found = bank.switch_steps(3, groups, task, 0, length)
    never = found == length
    assert never.float().mean().item() == pytest.approx(0.25, abs=4 * math.sqrt(0.1875 / 4_000))
    inside = found[~never]
    assert (inside.min().item(), inside.max().item()) == (8, 31)  # 0.2 and 0.8 of 40 steps
    counts = torch.bincount(inside)[8:].double()
    assert ((counts - counts.mean()).square() / counts.mean()).sum() < 57.1  # p = 1e-4, 23 degrees
    assert torch.equal(found, bank.switch_steps(3, groups, task, 0, length))
    subset = torch.tensor([5, 900, 7])
    assert torch.equal(found[subset], bank.switch_steps(3, subset, task[:3], 0, length))
    assert not torch.equal(found, bank.switch_steps(3, groups, task, 1, length))
    assert not torch.equal(found, bank.switch_steps(4, groups, task, 0, length))


@pytest.mark.parametrize(
    ("never", "window", "expected"),
    [
        (1.0, (0.0, 1.0), {40}),
        (0.0, (0.5, 0.5), {20}),
        (0.0, (0.0, 0.0), {0}),
        (0.0, (0.0, 0.1), {0, 1, 2, 3}),
    ],
)
def test_drift_window_and_probability_at_their_bounds(never, window, expected):
    bank, groups = bank_of(drifting(never, *window)), torch.arange(500)
    found = bank.switch_steps(3, groups, torch.zeros_like(groups), 0, 40)
    assert set(found.tolist()) == expected


def test_hosts_are_trained_with_the_settings_of_their_tasks():
    recipe = {"weight_decay": 0.03, "max_gradient_norm": 0.7, "learning_rate": 0.02}
    one = task_of(plain(1.0), host_learning_rate=0.01, **recipe)
    other = replace(task_of(plain(1.0), host_learning_rate=0.0, **recipe), name="other")
    found = task_engine(one, other, task_of=(0, 1, 0)).optimisation(0)
    assert found.host_learning_rate.tolist() == pytest.approx([0.01, 0.0, 0.01])
    assert found.seed_learning_rate.tolist() == [pytest.approx([0.02] * len(HOST.slots))] * 3
    assert (found.weight_decay, found.max_gradient_norm) == (0.03, 0.7)


def test_some_rows_are_measured_on_their_own_data():
    other = replace(task_of(plain(-2.0)), name="other")
    engine = task_engine(task_of(plain(1.0)), other, task_of=(0, 1, 1))

    def losses(some: Tensor | None) -> Tensor:
        seeds = SeedState.dormant((3 if some is None else len(some), len(HOST.slots)), CPU)
        return engine.measure(seeds, 0, committed=False, rows=some).scores.loss

    every, some = losses(None), torch.tensor([2, 0])
    assert torch.allclose(losses(some), every[some], rtol=1e-12)
    assert len(set(every.tolist())) == 3


def test_only_living_seeds_have_parameters():
    engine = task_engine(task_of(plain(1.0)), task_of=[0] * len(Stage))
    state = SeedState.dormant((len(Stage), len(HOST.slots)), CPU)
    kind = BLUEPRINTS.index("conv_light")
    state.stage[:] = torch.tensor(list(Stage))[:, None]
    state.blueprint[:] = kind
    found = engine.seed_parameters(state)
    whole = torch.tensor([slot.layouts[kind].size for slot in HOST.slots])
    for stage, counts in zip(Stage, found, strict=True):
        assert torch.equal(counts, whole if stage in LIVING else 0 * whole), stage


def test_each_environment_trains_and_validates_on_the_later_data_from_its_switch_on():
    """Images are around 1 before the switch, around -2 after it."""
    engine = task_engine(drifting(never=0.0), task_of=[0] * 6, length=40)
    switches = engine.switch_step.tolist()
    assert len(set(switches)) > 2
    for step in sorted({near for switch in switches for near in (switch - 1, switch)}):
        late = torch.tensor([step >= switch for switch in switches])
        images, _ = next(iter(engine.minibatches(step)))
        assert torch.equal(images.movedim(3, 0).flatten(1).lt(0.0).all(1), late)
        held_back = engine.bank.validation_images[engine.datasets(step)]
        assert torch.equal(held_back.flatten(1).lt(0.0).all(1), late)


def test_a_task_without_drift_never_switches():
    bank, groups = bank_of(small_task(HOST)), torch.arange(500)
    assert set(bank.switch_steps(3, groups, torch.zeros_like(groups), 0, 40).tolist()) == {40}


LENGTH = 4


def shifting(time: float, block: int = 1, host: NormedHost = HOST, **changes) -> Task:
    task = small_task(host)
    shift = ChannelShift(block, 1.0, seed=4)
    drift = Drift(task.data, time, time, 0.0, shift)
    return replace(task, drift=drift, host_learning_rate=0.0, **changes)


@pytest.mark.parametrize("host", [HOST, small_mlp(widths=(7, 5))], ids=lambda h: h.summary)
@pytest.mark.parametrize("block", [0, 1])
def test_a_moved_block_computes_its_channels_in_another_order(host: NormedHost, block: int):
    stack = random_stack(host, 1)
    width = host.weights[block].shape[0]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(1))
    parameters, buffers = host.channels_moved(block, order.tolist())
    moved = stack.host[:, parameters], stack.buffers[:, buffers]
    inputs = torch.randn(5, *host.image[:2], 1, host.image[2], dtype=F64)

    def outputs(rows: torch.Tensor, statistics: torch.Tensor) -> list[torch.Tensor]:
        x, found = host.enter(inputs), []
        for index in range(len(host.weights)):
            views = host.layout.views(rows), host.buffers.views(statistics)
            x = host.block(*views, index, x, training=False)
            found.append(x)
        return found

    before, after = outputs(stack.host, stack.buffers), outputs(*moved)
    assert torch.allclose(after[block], before[block][..., order], rtol=1e-12)
    assert all(torch.equal(*pair) for pair in zip(after[:block], before[:block], strict=True))


@pytest.mark.parametrize(("share", "moving"), [(0.01, 2), (0.5, 6), (1.0, 12)])
def test_a_share_of_the_channels_moves_on_cyclically(share: float, moving: int):
    order = ChannelShift(0, share, seed=7).order(12)
    assert sorted(order) == list(range(12))
    place = first = next(i for i, channel in enumerate(order) if channel != i)
    cycle = [place]
    while order[place] != first:
        place = order[place]
        cycle.append(place)
    assert len(cycle) == moving
    assert all(order[i] == i for i in range(12) if i not in cycle)
    assert ChannelShift(0, share, seed=7).order(12) == order
    assert ChannelShift(0, share, seed=8).order(12) != order


def test_channels_move_at_the_step_of_the_drift_in_the_hosts_that_drift_then():
    engine = task_engine(
        shifting(0.5), replace(small_task(HOST), host_learning_rate=0.0), length=LENGTH
    )
    stack, before = engine.stack, engine.stack.host.clone()
    stack.host_optimizer.first.copy_(before)
    stack.buffers.copy_(random_stack(HOST, 2).buffers)
    statistics = stack.buffers.clone()
    for step in (0, 1):
        assert engine.shift_channels(step) is None
    assert torch.equal(stack.host, before)
    move = engine.shift_channels(2)
    assert move is not None
    assert move.rows.tolist() == [0]
    assert torch.equal(stack.host[1], before[1])
    order = ChannelShift(1, 1.0, seed=4).order(HOST.weights[1].shape[0])
    old, new = (HOST.layout.views(rows) for rows in (before, stack.host))
    for name in (HOST.weights[1].name, "norm1.weight", "norm1.bias"):
        assert torch.equal(new[name][0], old[name][0, order])
    assert torch.equal(new[HOST.weights[0].name], old[HOST.weights[0].name])
    assert torch.equal(stack.host_optimizer.first, stack.host)
    was, now = (HOST.buffers.views(rows) for rows in (statistics, stack.buffers))
    for name in ("norm1.mean", "norm1.variance"):
        assert torch.equal(now[name], torch.stack([was[name][0, order], was[name][1]]))
    assert engine.shift_channels(3) is None
    engine.reset(1)
    assert engine.shift_channels(2) is not None


def test_a_drift_that_never_comes_moves_nothing():
    task = shifting(0.5)
    assert task.drift is not None
    engine = task_engine(replace(task, drift=replace(task.drift, never=1.0)), length=LENGTH)
    assert [engine.shift_channels(step) for step in range(LENGTH)] == [None] * LENGTH


def test_a_rollback_does_not_undo_a_shift():
    engine = task_engine(shifting(0.0), length=LENGTH)
    governor = Governor(engine.stack, HOST.classes)
    move = engine.shift_channels(0)
    assert move is not None
    governor.follow(move)
    shifted = row_of(engine.stack, 0)
    engine.stack.host.add_(1.0)
    engine.stack.buffers.add_(1.0)
    governor.restore(torch.tensor([True]))
    assert_identical(row_of(engine.stack, 0), shifted)


def test_environments_and_twins_meet_the_shift_and_score_like_a_shifted_network(backend: str):
    task = shifting(0.5, max_batches=1, batch_size=6, episode_length=LENGTH)
    settings = {"seed": 1, "episode_length": LENGTH, "dtype": F64, "backend": backend}
    env = small_environments([task], 4, **settings)
    env.reset(0)
    (shard,) = env.shards
    stack, idle = shard.engine.stack, torch.zeros(4, len(HEADS), dtype=torch.long)
    before = stack.host.clone()
    for step in range(LENGTH):
        env.step(idle)
        moved = (stack.host != before).any(1)
        assert moved.tolist() == [step >= 2] * 6
        assert torch.equal(shard.governor.copies[0], stack.host)
    # Computed with the unshifted parameters and the shift applied to the activations.
    order = ChannelShift(1, 1.0, seed=4).order(HOST.weights[1].shape[0])
    data, views = task.datasets()[1], HOST.layout.views(before[:1])
    inverse, back = HOST.channels_moved(1, torch.tensor(order).argsort().tolist())
    assert torch.equal(stack.host[:, inverse], before)
    statistics = HOST.buffers.views(stack.buffers[:1, back])
    x = HOST.enter(data.validation_images.to(F64)[:, :, :, None])
    places = [kind for kind, _ in HOST.program]
    assert set(places) <= {"input", "block", "norm", "slot", "pool", "head"}
    for kind, number in HOST.program:
        if kind == "block":
            x = HOST.block(views, statistics, number, x, training=False)
        elif kind == "norm":
            x = HOST.norm(views, statistics, number, x, training=False)
            x = x[..., order] if number == 1 else x
        elif kind == "pool":
            x = F.max_pool2d(x[:, :, :, 0].permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)[
                :, :, :, None
            ]
    logits = HOST.head(views, x)[0]
    loss = F.cross_entropy(logits, data.validation_labels)
    assert shard.progress.losses[0, -1].item() == pytest.approx(loss.item(), rel=1e-9)


def test_what_cannot_shift_is_refused_with_its_field():
    with pytest.raises(UsageError, match=r"^drift: block must be less than 2, .*got 2 .*'small'"):
        shifting(0.5, block=2)
    with pytest.raises(UsageError, match=r"^drift: block must be less than 0,"):
        shifting(0.5, block=0, host=small_gpt())  # type: ignore[arg-type]
    for fault in ({"share": 0.0}, {"share": 1.1}, {"block": -1}):
        with pytest.raises(UsageError, match=f"^drift: {next(iter(fault))} must"):
            ChannelShift(**({"block": 0, "share": 0.5, "seed": 1} | fault))
