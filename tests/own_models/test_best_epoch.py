"""The network that is handed back is that of the best epoch on validation, after the price."""

import copy
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.channel_groups import ChannelGroup, channel_groups
from esper.kasmina.deeper_stacks import deepen
from esper.kasmina.new_channels import NewChannels
from esper.kasmina.wider_layers import widen
from esper.leyline.stages import Stage
from esper.own_models import layer_growth
from esper.own_models.best_epoch import BestEpoch
from esper.own_models.objectives import Validation
from grown_modules import products
from own_modules import loader
from wide_modules import multilayer

EPOCHS = 30


def overfitted(policy: str, **more: Any) -> esper.GrowthResult:
    """Few samples with wrong labels at a high rate: late epochs are worse than some before."""
    torch.manual_seed(0)
    x, y = products(48, 0)
    y[::2] = 1 - y[::2]
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.03),
        "epochs": EPOCHS, "progress": False, "price": 0.001,
    }  # fmt: skip
    loaders = loader(x, y), loader(*products(256, 1))
    # Six times as wide, whatever the table expects of such layers.
    with patch.object(layer_growth, "planned_counts", six_times):
        return esper.grow(multilayer(), *loaders, policy=policy, **(arguments | more))


def six_times(_: nn.Module, groups: list[ChannelGroup], __: object) -> dict[ChannelGroup, int]:
    return {group: 5 * group.channels for group in groups}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6)) for _ in range(2)))


def widened(module: nn.Module) -> None:
    x = torch.randn(8, 6)
    with torch.no_grad():
        group = channel_groups(module, lambda: module(x))[0][0]
    entries = {
        f"{name}.{key}": torch.randn(2, *p.shape[1:])
        for name in group.writers
        for key, p in module.get_submodule(name).named_parameters()
    }
    widen(module, group, NewChannels(entries, 2))


def deepened(module: nn.Module) -> None:
    deepen(module, "blocks", 0, ())


def record(epoch: int, share: float) -> esper.EpochRecord:
    result = Validation(1.0, share, share, None, "accuracy")
    return esper.EpochRecord(epoch, None, result, 100, 0, {}, {})


def worths(result: esper.GrowthResult) -> list[float]:
    """What each epoch is worth, computed by hand."""
    host = result.host_parameters
    return [r.validation.net - 0.001 * log(r.parameters / host) for r in result.history]


def test_what_an_epoch_is_worth_falls_with_the_price_of_its_parameters() -> None:
    best, validation = BestEpoch(nn.Linear(9, 10), 0.1), record(1, 0.8).validation
    assert best.net_worth(validation, 100) == pytest.approx(0.8)
    assert best.net_worth(validation, 250) == pytest.approx(0.8 - 0.1 * log(2.5))


def test_the_best_epoch_is_handed_back_of_the_twin_as_well() -> None:
    last = overfitted("widen", best_epoch=False, twin=True)
    best = overfitted("widen", twin=True)
    assert last.twin is not None
    assert best.twin is not None
    for one, two in ((last, best), (last.twin, best.twin)):
        # Training itself is the same.
        assert [r.validation for r in one.history] == [r.validation for r in two.history]
        epoch = max(range(EPOCHS), key=worths(two).__getitem__)
        line = f"epoch {epoch + 1} is handed back"
        returns = any(line in text for text in two.history[-1].actions)
        assert two.validation == (two.history[epoch].validation if returns else one.validation)
        assert two.parameters == sum(p.numel() for p in two.model.parameters())
        ends = two.history[epoch].validation, two.history[-1].validation
        accuracy = [float(each.accuracy or 0) for each in ends]
        # Two standard errors of a difference of shares of 256 samples, at most.
        assert returns or accuracy[0] - accuracy[1] < 2 * (0.5 / 256) ** 0.5
    assert any("is handed back" in line for line in best.history[-1].actions)
    assert "0" in best.widths


def test_layers_that_grew_later_are_not_in_an_earlier_epoch() -> None:
    torch.manual_seed(0)
    model, deep = multilayer(), Residual()
    for module, change in ((model, widened), (deep, deepened)):
        best, before = BestEpoch(module, 0.01), copy.deepcopy(module.state_dict())
        best.offer(record(1, 0.9), module, [])
        change(module)
        best.offer(record(2, 0.8), module, [("blocks", 0)])
        assert best.epoch == 1
        deeper = best.exchange(module, [("blocks", 0)])
        assert deeper == []
        assert module.state_dict().keys() == before.keys()
        assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
        # And back to what it was before.
        assert best.exchange(module, deeper) == [("blocks", 0)]
        assert not all(
            name in before and torch.equal(x, before[name])
            for name, x in module.state_dict().items()
        )


def test_a_plain_loop_ends_with_its_last_epoch() -> None:
    never = overfitted("never")
    assert never.validation == never.history[-1].validation


@pytest.mark.parametrize("last", [4, 12])
def test_the_best_epoch_survives_a_kill(tmp_path: Path, last: int) -> None:
    whole = overfitted("widen")

    def stop(record: esper.EpochRecord) -> None:
        if record.epoch == last + 1:
            raise KeyboardInterrupt

    path = tmp_path / "growth.pt"
    with pytest.raises(KeyboardInterrupt):
        overfitted("widen", checkpoint=path, callbacks=[stop])
    resumed = overfitted("widen", checkpoint=path)
    state = whole.model.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in resumed.model.state_dict().items())
    assert resumed.history[-1].actions == whole.history[-1].actions


def test_an_epoch_in_which_a_seed_is_tried_does_not_count() -> None:
    module = multilayer()
    best = BestEpoch(module, 0.01)
    best.offer(replace(record(1, 0.9), stages={"0": Stage.HOLDING}), module, [])
    assert best.epoch == 0
    best.offer(replace(record(2, 0.8), stages={"0": Stage.FOSSILISED}), module, [])
    assert best.epoch == 2
