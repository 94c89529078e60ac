"""What ``Growth`` waits for in a loop of one's own: the first call and the first update."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import _global_optimizer_pre_hooks

import esper
from esper.leyline.errors import UsageError
from own_modules import ResidualNet, images, loader, perceptron, unchanged


def trained(model: nn.Module, optimizer: Any) -> None:
    for x, y in loader(*images(32)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def grown(gives_optimizer: bool) -> nn.Module:
    torch.manual_seed(0)
    model = ResidualNet()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    given = (optimizer,) if gives_optimizer else ()
    growth = esper.Growth(
        model, *given, policy="rule", epochs=12, validate=lambda: 0.5, price=0.0, report=None
    )
    other = SGD(perceptron().parameters(), lr=0.1)
    for _ in range(12):
        other.step()
        trained(model, optimizer)
        growth.step()
        if len(growth.history) == 4:
            assert growth.seeds
            joined = {id(p) for group in optimizer.param_groups for p in group["params"]}
            assert all(id(p) in joined for p in model.parameters())
    assert not _global_optimizer_pre_hooks
    return model


def test_growth_takes_the_optimizer_that_updates_the_module_first() -> None:
    one, two = grown(gives_optimizer=False), grown(gives_optimizer=True)
    assert unchanged(one, two.state_dict())


def test_an_optimizer_that_was_not_found_or_that_seeds_cannot_join_is_named() -> None:
    x = images(4)[0]
    model = ResidualNet()
    growth = esper.Growth(model, policy="rule", validate=lambda: 0.5, report=None)
    model(x)
    with pytest.raises(UsageError, match="optimizer: none has updated the module yet; give it"):
        growth.step()
    growth.finish()
    assert not _global_optimizer_pre_hooks

    growth = esper.Growth(model, policy="rule", validate=lambda: 0.5, report=None)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: F.cross_entropy(model(x), images(4)[1]))
    with pytest.raises(UsageError, match="optimizer: LBFGS keeps one state"):
        growth.step()
    growth.finish()

    flat = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 2, bias=False))
    with pytest.raises(UsageError, match="optimizer: Muon updates matrices alone"):
        esper.Growth(flat, torch.optim.Muon(flat.parameters()), validate=lambda: 0.5)


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
