"""The models of one's own that ``own_model_results`` compares: module, data, recipe, score."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from own_model_nets import Gpt, ResidualNet, ResNet18, convolutional, perceptron
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from esper.own_models.growing import grow
from esper.own_models.objectives import Validation
from esper.runtime.data import digits
from esper.runtime.text import BITS_PER_NAT, SHIPPED_TEXT, text

CONTEXT = 64
"""Bytes in a window of the text."""
PRETRAINING_EPOCHS, PRETRAINING_RATE = 20, 1e-2
"""How the pretrained module was trained on digits as they are."""
Recipe = dict[str, float]
"""Learning rate, and for the pretrained module the part of it that its backbone gets."""


class Batches:
    """Minibatches of two tensors, without the cost of collating sample by sample.

    Args:
        inputs: one row per sample.
        targets: the same number of rows.
        size: samples in a minibatch.
        most: minibatches in an epoch, of samples drawn without replacement; None for all samples
            in order.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, size: int, most: int | None = None):
        self.inputs, self.targets, self.size, self.most = inputs, targets, size, most

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch."""
        count = len(self.inputs)
        order = torch.arange(count) if self.most is None else torch.randperm(count)
        for chosen in order.split(self.size)[: self.most]:
            yield self.inputs[chosen], self.targets[chosen]


Loaders = tuple[Batches, Batches, Batches]
"""Minibatches for training, validation and test."""


@dataclass(frozen=True)
class Case:
    """A model of one's own.

    Attributes:
        build: makes the module of a width, and with the seed where it is pretrained.
        width: its width.
        loaders: the data, split by a seed.
        loss: name of the loss.
        epochs: epochs of training.
        recipes: recipes among which every arm is tuned.
        measure: the figure that is reported, of a validation; higher is better.
        figure: its name and unit.
        description: the module and its data.
        clip: largest norm of the gradient; None for none.
        multiple: of what the width is a multiple.
    """

    build: Callable[[int, int], nn.Module]
    width: int
    loaders: Callable[[int], Loaders]
    loss: str
    epochs: int
    recipes: tuple[Recipe, ...]
    measure: Callable[[Validation], float]
    figure: str
    description: str
    clip: float | None = None
    multiple: int = 1

    def optimizer(self, model: nn.Module, recipe: Recipe) -> Optimizer:
        """AdamW; seeds join the last group, of the head where the backbone has its own rate."""
        rate = recipe["rate"]
        if "backbone" not in recipe:
            return AdamW(model.parameters(), lr=rate)
        *backbone, weight, bias = model.parameters()
        return AdamW(
            [
                {"params": backbone, "lr": rate * recipe["backbone"]},
                {"params": [weight, bias], "lr": rate, "name": "seeds"},
            ]
        )

    def scheduler(self, optimizer: Optimizer, epochs: int) -> LRScheduler:
        """A cosine to 0."""
        return CosineAnnealingLR(optimizer, epochs)


def rates(*values: float) -> tuple[Recipe, ...]:
    """A recipe for each learning rate."""
    return tuple({"rate": value} for value in values)


def digit_images(seed: int, shift: int, size: int = 64) -> Loaders:
    """Digits with noise, shifted by up to ``shift`` pixels.

    An epoch has as many images, in minibatches of ``size``, as there are without shifts.
    """
    data = digits(shift=shift, noise=0.1, seed=seed)

    def planes(images: Tensor) -> Tensor:
        return images.movedim(-1, 1).contiguous()

    return (
        Batches(planes(data.train_images), data.train_labels, size, 1216 // size),
        Batches(planes(data.validation_images), data.validation_labels, 300),
        Batches(planes(data.test_images), data.test_labels, 300),
    )


def patients(seed: int) -> Loaders:
    """scikit-learn's diabetes: ten numbers of each of 442 patients, and the disease a year later.

    The target is scaled by the mean and standard deviation of the training patients.
    """
    x, y = (torch.from_numpy(part).float() for part in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, validation, test = order.split([262, 90, 90])
    y = (y - y[train].mean()) / y[train].std()
    x *= 20.0
    return (
        Batches(x[train], y[train], 32, 9),
        Batches(x[validation], y[validation], 90),
        Batches(x[test], y[test], 90),
    )


def windows(seed: int) -> Loaders:
    """The text that comes with Esper; 20 minibatches of 16 windows an epoch. The split is fixed."""
    data = text(SHIPPED_TEXT, CONTEXT)

    def tokens(images: Tensor) -> Tensor:
        return images[:, 0, :, 0].long()

    return (
        Batches(tokens(data.train_images), data.train_labels, 16, 20),
        Batches(tokens(data.validation_images), data.validation_labels, 64),
        Batches(tokens(data.test_images), data.test_labels, 64),
    )


def pretrained(width: int, seed: int) -> nn.Module:
    """The convolutional module of ``width``, trained on digits that are not shifted."""
    torch.manual_seed(seed)
    model, (train, validation, _) = convolutional(width), digit_images(seed, 0)
    grow(
        model,
        train,
        validation,
        policy="never",
        epochs=PRETRAINING_EPOCHS,
        optimizer=lambda parameters: AdamW(parameters, lr=PRETRAINING_RATE),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, PRETRAINING_EPOCHS),
        progress=False,
    )
    return model


def _accuracy(found: Validation) -> float:
    assert found.accuracy is not None
    return 100.0 * found.accuracy


of_images = partial(Case, loss="cross_entropy", measure=_accuracy, figure="accuracy, %")
CASES = {
    "residual CNN": of_images(
        lambda width, seed: ResidualNet(width),
        4,
        partial(digit_images, shift=2),
        epochs=40,
        recipes=rates(3e-3, 1e-2, 3e-2, 1e-1),
        description="two residual blocks of 4 and 8 channels, dropout 0.1; digits shifted by up to "
        "2 pixels with noise 0.1",
    ),
    "ResNet-18": of_images(
        lambda width, seed: ResNet18(width, 1),
        4,
        partial(digit_images, shift=0, size=128),
        epochs=20,
        recipes=rates(3e-3, 1e-2, 3e-2),
        description="ResNet-18 of 4 to 32 channels; digits with noise 0.1",
    ),
    "MLP": Case(
        lambda width, seed: perceptron(width),
        16,
        patients,
        "mse",
        40,
        rates(3e-4, 1e-3, 3e-3, 1e-2),
        lambda found: 100.0 * found.score,
        "explained variance, %",
        "two hidden layers of 16 units, dropout 0.1; scikit-learn's diabetes",
    ),
    "GPT": Case(
        lambda width, seed: Gpt(width, CONTEXT),
        16,
        windows,
        "cross_entropy",
        20,
        rates(3e-3, 1e-2, 3e-2),
        lambda found: -BITS_PER_NAT * found.loss,
        "negative bits per byte",
        "two blocks of width 16, tied embedding; next byte of the text that comes with Esper",
        clip=1.0,
        multiple=4,
    ),
    "pretrained CNN": of_images(
        pretrained,
        4,
        partial(digit_images, shift=2),
        epochs=40,
        recipes=tuple(
            {"rate": rate, "backbone": part} for rate in (1e-2, 3e-2) for part in (0.0, 0.1, 1.0)
        ),
        description="two convolutions of 4 and 8 channels, trained on digits; then the digits are "
        "shifted by up to 2 pixels. The wider network was trained on digits at its own width: who "
        "has a single pretrained network has no such opponent",
    ),
}
"""The models by name."""
