"""Copied channels become random ones: how fast, until when, and after a kill."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from test_width_search import numbers
from torch import Tensor, nn

import esper
from esper.kasmina.blending import PACE, STEPS, Blend, moves_to
from esper.own_models.layer_growth import LayerGrowth
from own_modules import loader, unchanged
from wide_modules import normed


def layers() -> tuple[nn.Module, nn.Module]:
    """A layer, and one of which the weight is 1 more, and the bias the same."""
    model = nn.Linear(3, 2)
    goal = copy.deepcopy(model)
    goal.weight.data += torch.tensor([1.0, -0.5, 0.0])
    return model, goal


def steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    """So many steps, in each of which no gradient moves a parameter."""
    for _ in range(count):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        optimizer.step()


@pytest.mark.parametrize(("rate", "count"), [(0.01 / PACE, 100), (10.0, STEPS)])
def test_an_entry_moves_by_the_rate_and_at_most_a_share_until_it_is_there(
    rate: float, count: int
) -> None:
    model, goal = layers()
    blend = Blend(model, moves_to(model, goal))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    before = copy.deepcopy(model)
    steps(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), 3)
    steps(optimizer, 1)
    each = 1.0 / count
    moved = model.weight - before.weight
    torch.testing.assert_close(moved, torch.tensor([[each, -each, 0.0]] * 2))
    assert torch.equal(model.bias, before.bias)
    steps(optimizer, count - 2)
    assert blend.state_dict(model)
    steps(optimizer, 2)
    assert not blend.state_dict(model)
    torch.testing.assert_close(model.weight, goal.weight)
    steps(optimizer, 3)
    torch.testing.assert_close(model.weight, goal.weight)


def test_what_is_undone_or_dropped_takes_no_further_step() -> None:
    model, goal = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    blend = Blend(model, moves_to(model, goal))
    steps(optimizer, 5)
    state = copy.deepcopy(model.state_dict())
    blend.undo()
    steps(optimizer, 5)
    assert unchanged(model, state)
    Blend(model, moves_to(model, goal))
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert reference() is None


def grown(checkpoint: Path | None = None, last: int = 12) -> esper.GrowthResult:
    """A perceptron with norms, grown at a rate at which blending outlasts the trial."""

    def stop(record: esper.EpochRecord) -> None:
        if record.epoch == last + 1:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    return esper.grow(
        normed(), loader(*numbers(256, 0)), loader(*numbers(128, 1)), epochs=12, progress=False,
        price=0.0, optimizer=lambda each: torch.optim.Adam(each, lr=0.002 / PACE), best_epoch=False,
        checkpoint=checkpoint, callbacks=[stop],
    )  # fmt: skip


def test_growth_that_blends_resumes_in_the_same_bits_and_ends_with_training(tmp_path: Path) -> None:
    whole = grown()
    assert any("at first copies of these" in line for r in whole.history for line in r.actions)
    for last in (2, 5):
        path = tmp_path / f"{last}.pt"
        with pytest.raises(KeyboardInterrupt):
            grown(path, last)
        state = grown(path).model.state_dict()
        assert unchanged(whole.model, state)
    state = copy.deepcopy(whole.model.state_dict())
    steps(torch.optim.SGD(whole.model.parameters(), lr=0.01), 3)
    assert unchanged(whole.model, state)


def test_where_all_is_refused_no_trial_takes_place(monkeypatch) -> None:
    monkeypatch.setattr(LayerGrowth, "_problem", lambda *_: "no")
    actions = [line for record in grown().history for line in record.actions]
    assert any("is not widened (no)" in line for line in actions)
    assert not any("with and without" in line for line in actions)


def weights_of_copies(model: nn.Sequential) -> Tensor:
    """The sums of the weights by which the two copies of each channel are read."""
    weight = model[3].weight.detach()
    return weight.unflatten(1, (3, -1))[:, 1:].sum(1)


def test_equal_channels_become_different_ones_in_a_loop_without_an_optimizer_at_first() -> None:
    torch.manual_seed(0)
    model, data = normed(), loader(*numbers(256, 0))
    change = esper.widen(model, data, factor=3)
    outputs = model[0](numbers(64, 2)[0])
    width = outputs.shape[1] // 3
    torch.testing.assert_close(outputs[:, :width], outputs[:, width : 2 * width])
    assert weights_of_copies(model).abs().max() < 1e-6
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps(optimizer, 200)
    first, *copies = model[0](numbers(64, 2)[0]).chunk(3, 1)
    torch.testing.assert_close(first, outputs[:, :width])
    assert all((x - first).std() > 0.3 * first.std() for x in copies)
    assert (copies[0] - copies[1]).std() > 0.3 * first.std()
    assert weights_of_copies(model).abs().min() > 0.0
    assert weights_of_copies(model).std() > 0.05 * model[3].weight[:, :width].std()
    change.undo()
    assert model[0].out_features == width
