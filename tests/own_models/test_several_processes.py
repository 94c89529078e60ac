"""A model that several processes train becomes wider alike in all of them."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import esper
from esper.leyline.errors import UsageError

PROCESSES = 2


def widened(rank: int, folder: str) -> None:
    """Widen a model by minibatches of the process, train it, and save both states."""
    distributed.init_process_group("gloo", f"file://{folder}/store", None, PROCESSES, rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    enlargement = esper.widen(model, [(x, y)], optimizer=optimizer, factor=2.0)
    wide = [parameter.detach().clone() for parameter in model.parameters()]
    shared = nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(shared(x), y).backward()
        optimizer.step()
    with pytest.raises(UsageError, match="several processes train it"):
        esper.Growth(model, optimizer, policy="rule", validate=lambda: 0.0)
    for shard in fully_shard, partial(FullyShardedDataParallel, device_id=torch.device("cpu")):
        with pytest.raises(UsageError, match="before you shard it"):
            esper.widen(shard(copy.deepcopy(model)), [(x, y)])
    torch.save((enlargement.lines[-1], wide, list(model.parameters())), f"{folder}/{rank}")
    distributed.destroy_process_group()


def test_new_units_are_those_of_the_first_process_and_learn_alike(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(widened, (str(tmp_path),), PROCESSES)
    states = [torch.load(tmp_path / str(i), weights_only=False) for i in range(PROCESSES)]
    (line, *first), (_, *second) = states
    assert "DistributedDataParallel" in line
    for one, two in zip(first, second, strict=True):
        assert one[0].shape == (8, 6)
        assert all(map(torch.equal, one, two))
    assert not torch.equal(first[0][0], first[1][0])
