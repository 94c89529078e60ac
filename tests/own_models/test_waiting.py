"""What ``Growth`` waits for in a loop of one's own, and what it refuses to wait for."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import SGD

import esper
from esper.leyline.errors import UsageError
from own_modules import ResidualNet, images


def test_an_optimizer_that_seeds_cannot_join_is_named() -> None:
    flat = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 2, bias=False))
    for optimizer, line in (
        (torch.optim.LBFGS(flat.parameters()), "LBFGS keeps one state"),
        (torch.optim.Muon(flat.parameters()), "Muon updates matrices alone"),
    ):
        with pytest.raises(UsageError, match=f"optimizer: {line}"):
            esper.Growth(flat, optimizer, validate=lambda: 0.5)


def test_a_module_that_waits_for_its_first_call_is_pickled_and_copied() -> None:
    model = ResidualNet().eval()
    values = iter([0.5])
    options = {"policy": "rule", "validate": lambda: next(values), "report": None}
    growth = esper.Growth(model, SGD(model.parameters(), lr=0.1), **options)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    x = images(4)[0]
    copied = copy.deepcopy(model)
    for other in (torch.load(buffer, weights_only=False), copied):
        assert torch.equal(other(x), other(x))
        assert not other._forward_pre_hooks
    with pytest.raises(UsageError, match="the module has not been called yet"):
        growth.step(0.5)
    model(x)
    assert not model._forward_pre_hooks
    growth.step(0.5)
    assert growth.slots
