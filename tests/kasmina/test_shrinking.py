"""Shrinking a trained model towards a fresh one."""

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import UsageError


def model(seed: int, width: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def test_each_parameter_is_a_share_of_both_and_the_model_stays_as_it_was() -> None:
    trained, fresh = model(1), model(2)
    trained(torch.randn(8, 3))  # moves the running statistics
    trained[2].bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    shrunk = esper.shrink_and_perturb(trained, fresh, share=0.25)
    assert type(shrunk) is nn.Sequential
    new = fresh.state_dict()
    for name, tensor in shrunk.state_dict().items():
        assert torch.equal(trained.state_dict()[name], before[name])
        keeps = "running" in name or "num_batches" in name or name == "2.bias"
        expected = before[name] if keeps else 0.25 * before[name] + 0.75 * new[name]
        torch.testing.assert_close(tensor, expected)


def test_a_shared_parameter_stays_shared() -> None:
    trained, fresh = model(1, width=3), model(2, width=3)
    for each in (trained, fresh):
        each.add_module("3", nn.Linear(2, 3))
        each.append(nn.Linear(3, 3))
        each[4].weight = each[0].weight
    shrunk = esper.shrink_and_perturb(trained, fresh)
    assert shrunk[4].weight is shrunk[0].weight
    torch.testing.assert_close(shrunk[0].weight, 0.6 * trained[0].weight + 0.4 * fresh[0].weight)


@pytest.mark.parametrize(
    ("fresh", "share", "line"),
    [
        (model(2), 1.5, "share: must lie in [0, 1], got 1.5"),
        (model(2), float("nan"), "share: must lie in [0, 1], got nan"),
        (model(2, width=5), 0.3, "fresh: has another parameter '0.weight' than the model"),
        (model(2)[:2], 0.3, "fresh: has another parameter '2.weight' than the model"),
        (model(2).append(nn.PReLU()), 0.3, "fresh: has another parameter '3.weight'"),
    ],
)
def test_what_does_not_fit_is_refused(fresh: nn.Module, share: float, line: str) -> None:
    with pytest.raises(UsageError) as error:
        esper.shrink_and_perturb(model(1), fresh, share)
    assert str(error.value).startswith(line)
