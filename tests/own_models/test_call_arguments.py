"""What ``esper.grow`` refuses, and what it checks before epochs are spent."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import TensorDataset

import esper
from esper.leyline.errors import UsageError
from esper.own_models.objectives import objective
from esper.own_models.options import GrowOptions, check_batch
from own_modules import ResidualNet, images, loader, perceptron, table, unchanged

IMAGES = loader(*images(32))


def refused(model: nn.Module, **arguments: Any) -> str:
    """The line with which ``grow`` refuses; the module is as before."""
    before = copy.deepcopy(model.state_dict())
    loaders = {name: arguments.pop(name, IMAGES) for name in ("train_loader", "validation_loader")}
    with pytest.raises(UsageError) as caught:
        esper.grow(model, **loaders, epochs=2, progress=False, **arguments)
    assert unchanged(model, before)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_loader": None}, "validation_loader: got a NoneType; give a DataLoader"),
        ({"test_loader": 3}, "test_loader: got a int; give a DataLoader"),
        ({"test_loader": []}, "test_loader: it yields no batch"),
        ({"train_loader": TensorDataset(*images(8))}, "train_loader: got a TensorDataset; give"),
        ({"scheduler": 0.1}, "scheduler: got a float; give a function that makes one"),
        ({"metric": "accuracy"}, "metric: got 'accuracy'; give a function of predictions"),
        ({"callbacks": print}, "callbacks: got a builtin_function_or_method; give a list"),
        ({"policy": None}, "policy: got None; give a name"),
        ({"amp_dtype": "bfloat16"}, "amp_dtype: got 'bfloat16'; give a dtype"),
        ({"device": "nowhere"}, "device: nowhere is not usable"),
        ({"loss": nn.CrossEntropyLoss}, "loss: got the class CrossEntropyLoss; give an instance"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss: it has the shape \(16,\)"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_in_one_line(
    change: dict[str, Any], message: str
) -> None:
    assert re.match(message, refused(ResidualNet(), **change))


def test_an_optimizer_and_a_scheduler_are_made_by_functions_not_given() -> None:
    model = ResidualNet()
    made = SGD(model.parameters(), lr=0.1)
    assert refused(model, optimizer=made).startswith("optimizer: got a SGD; give a function")
    text = refused(model, scheduler=ConstantLR(made))
    assert text.startswith("scheduler: got a ConstantLR; give a function")


def test_a_loss_that_fails_is_refused_before_an_epoch_is_trained() -> None:
    x, y = images(32)
    beyond = loader(x, y + 7)
    assert refused(ResidualNet(), test_loader=beyond).startswith(
        "test_loader: a label is outside the 4 classes of the output (Target"
    )
    inputs, target = table(16)
    text = refused(perceptron(3), train_loader=loader(inputs, target), loss="mse")
    assert text.startswith("train_loader: model or loss fails on its first batch (mat1 and mat2")


class Copier(nn.Module):
    """It has an output for each token, and may be told which count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layers(input_ids)


@pytest.mark.parametrize("padding", [False, True])
def test_labels_that_are_the_inputs_are_refused(padding: bool) -> None:
    """A language model of Hugging Face's shifts them, and computes its loss of them."""
    tokens = torch.randint(9, (4, 6))
    labels = tokens.clone()
    if padding:
        labels[:, 4:] = -100
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    line = "its labels are its input_ids, which it would copy; give loss='model' if the module"
    assert f"train_loader: {line}" in refused(Copier(), train_loader=[batch])


def test_labels_that_differ_from_the_inputs_are_learned() -> None:
    tokens = torch.randint(8, (4, 6))
    masked = {"input_ids": torch.where(tokens > 3, 8, tokens), "labels": tokens}
    masked["labels"] = torch.where(tokens > 3, tokens, -100)
    uncounted = {"input_ids": tokens, "labels": torch.full_like(tokens, -100)}
    later = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
    for batch in (masked, later, uncounted):
        check_batch(
            "train_loader", Copier(), batch, objective("cross_entropy"), torch.device("cpu"),
            GrowOptions(),
        )  # fmt: skip


def test_a_module_that_fails_without_its_labels_is_given_a_hint() -> None:
    batch = {"x": torch.ones(4, 3), "labels": torch.ones(4, dtype=torch.int64)}
    text = refused(Copier(), train_loader=[batch])
    assert text.endswith("'x'); give loss='model' if the module computes its loss of the labels")
    assert "give loss" not in refused(Copier(), train_loader=[batch], loss="model")


def test_checking_the_first_batches_draws_no_random_number() -> None:
    torch.manual_seed(3)
    model = ResidualNet()
    other = copy.deepcopy(model)
    torch.manual_seed(4)
    esper.grow(model, IMAGES, IMAGES, epochs=1, policy="never", progress=False)
    torch.manual_seed(4)
    esper.grow(other, IMAGES, IMAGES, test_loader=IMAGES, epochs=1, policy="never", progress=False)
    assert unchanged(model, other.state_dict())
