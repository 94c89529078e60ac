"""Shifts at the feature level: channels of a block change places at the step of the drift."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from esper.kasmina.hosts.host import NormedHost
from esper.leyline.actions import HEADS
from esper.leyline.errors import UsageError
from esper.runtime.task import ChannelShift, Drift, Task
from esper.tolaria.governor import Governor
from support import (
    F64,
    assert_identical,
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
    assert set(places) <= {"input", "block", "slot", "pool", "head"}
    for kind, number in HOST.program:
        if kind == "block":
            x = HOST.block(views, statistics, number, x, training=False)
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
