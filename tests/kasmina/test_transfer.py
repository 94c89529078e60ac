"""Tensors of every shape and kind arrive in CPU memory, in one transfer."""

import torch

from esper.kasmina.transfer import on_host
from virtual_device import virtual_device


def test_expanded_and_odd_tensors_arrive_in_one_transfer() -> None:
    expected = [
        torch.tensor([True, False, True]),
        torch.tensor(3).expand(4),
        torch.arange(6, dtype=torch.int32).view(2, 3).T,
        torch.tensor(0.5, dtype=torch.float64),
        torch.zeros(0, 2),
    ]
    with virtual_device() as machine:
        # `Tensor.to` would materialise the expanded one.
        there = [
            x.to("cuda:0") if x.stride() != (0,) else x[:1].to("cuda:0").expand(4) for x in expected
        ]
        before = sum(machine.syncs.values())
        found = on_host(*there)
        assert sum(machine.syncs.values()) == before + 1
    for x, y in zip(found, expected, strict=True):
        assert x.device.type == "cpu"
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
