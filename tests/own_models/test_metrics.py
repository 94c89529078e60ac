"""Metrics of the user's own get predictions and targets of any form, joined along the samples."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from esper.leyline.errors import UsageError
from esper.own_models.objectives import Evaluator, objective
from esper.own_models.samples import unpack, unpack_for

x, boxes = torch.randn(10, 3), torch.randn(10, 2)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Detector(nn.Module):
    """A dict output without a key that names the prediction."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        both = Pair(x, 2 * x)
        return {"boxes": x[:, :2], "pair": both, "loss": x.square().mean(), "hidden": None}


class Noted:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, prediction: Any, target: Any) -> float:
        self.seen.append((prediction, target))
        return 0.5

    @property
    def last(self) -> tuple[Any, Any]:
        return self.seen[-1]


class Updated(Noted):
    """As in torchmetrics."""

    update = Noted.__call__

    def compute(self) -> float:
        return 0.5

    def reset(self) -> None:
        pass


def own(output: dict[str, Tensor], target: Any) -> Tensor:
    return output["loss"]


def evaluated(model: nn.Module, batches: list[Any], loss: Any, metric: Any) -> float | None:
    options = {"metric": metric, "unpack": unpack_for(loss, unpack)}
    return Evaluator(model, batches, objective(loss), torch.device("cpu"), **options)().metric


@pytest.mark.parametrize("loss", [own, "model"])
def test_a_dict_output_that_names_no_prediction_is_joined_as_it_is(loss: Any) -> None:
    metric = Noted()
    labels = {"labels": boxes[:6]}, {"labels": boxes[6:]}
    batches = [{"x": x[:6]} | labels[0], {"x": x[6:]} | labels[1]]
    assert evaluated(Detector(), batches, loss, metric) == 0.5
    found, target = metric.last
    assert torch.equal(target, boxes)
    assert torch.equal(found["boxes"], x[:, :2])
    assert isinstance(found["pair"], Pair)
    assert torch.equal(found["pair"].right, 2 * x)
    assert found["hidden"] is None
    assert found["loss"].tolist() == [float(part.square().mean()) for part in (x[:6], x[6:])]


def test_targets_that_are_dicts_or_missing_are_joined_too() -> None:
    metric = Noted()
    batches: list[Any] = [
        (x[:6], {"boxes": boxes[:6], "parts": [x[:6], None]}),
        (x[6:], {"boxes": boxes[6:], "parts": [x[6:], None]}),
    ]
    evaluated(Detector(), batches, own, metric)
    target = metric.last[1]
    assert torch.equal(target["boxes"], boxes)
    assert torch.equal(target["parts"][0], x)
    assert target["parts"][1] is None
    evaluated(Detector(), [{"x": x}, {"x": x}], "model", metric)
    assert metric.last[1] is None


def test_a_metric_that_is_updated_gets_the_dict_of_each_batch() -> None:
    metric = Updated()
    evaluated(Detector(), [(x[:6], boxes[:6]), (x[6:], boxes[6:])], own, metric)
    assert [len(found["boxes"]) for found, _ in metric.seen] == [6, 4]


def test_a_named_loss_still_needs_a_named_prediction() -> None:
    with pytest.raises(UsageError, match="return the prediction as 'logits', or give a loss"):
        evaluated(Detector(), [(x, boxes)], "mse", Noted())


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x}


@pytest.mark.parametrize(
    ("one", "two", "reason"),
    [
        ((x[:6], boxes[:6]), (torch.randn(4, 5), boxes[6:]), "Sizes of tensors must match"),
        ((x[:6], boxes[:6]), (x[6:], None), "expected Tensor"),
        ((x[:6], {"a": x}), (x[6:], {"b": x}), "their keys differ"),
        ((x[:6], {"a": x}), (x[6:], boxes[6:]), "has no attribute 'keys'"),
        ((x[:6], [x]), (x[6:], [x, x]), "argument 2 is longer"),
        ((x[:6], "text"), (x[6:], "text"), "one is a str"),
    ],
)
def test_batches_that_cannot_be_joined_are_refused(one: Any, two: Any, reason: str) -> None:
    def loss(output: dict[str, Tensor], target: Any) -> Tensor:
        return output["logits"].square().mean()

    with pytest.raises(UsageError, match=reason) as caught:
        evaluated(Tokens(), [one, two], loss, Noted())
    assert str(caught.value).startswith("metric: predictions or targets of the batches cannot be")
    assert str(caught.value).endswith("; give an object with update and compute")
    assert "\n" not in str(caught.value)
