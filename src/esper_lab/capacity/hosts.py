"""Hosts whose width was drawn: networks, their data and their circumstances.

A host is a network with layers of a drawn width, a drawn number of noisy samples, a price of
parameters, and a number of epochs; half of the hosts arrive trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper_lab.families import log_uniform

VALIDATION, TEST = 300, 2000
Architecture = Callable[[int, int, int, int], nn.Module]
"""Makes a network from inputs, width, depth and outputs."""


def perceptron(inputs: int, width: int, depth: int, outputs: int) -> nn.Module:
    """``depth`` hidden layers."""
    sizes = [inputs, *[width] * depth]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _norm(inputs: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def _image_net(width: int, outputs: int, block: Callable[[], nn.Module], count: int) -> nn.Module:
    layers = [nn.Unflatten(1, (1, 8, 8)), *_norm(1, width), nn.MaxPool2d(2)]
    layers += [block() for _ in range(count)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs))


def convolutions(_: int, width: int, depth: int, outputs: int) -> nn.Module:
    """``depth`` convolutions on images of 8 x 8 pixels."""
    return _image_net(width, outputs, lambda: nn.Sequential(*_norm(width, width)), depth - 1)


class Block(nn.Module):
    """Two convolutions that add to what they are given."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(*_norm(width, width), *_norm(width, width)[:2])

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` to the same shape."""
        return (x + self.inner(x)).relu()


def residual(_: int, width: int, depth: int, outputs: int) -> nn.Module:
    """``depth`` residual blocks on images of 8 x 8 pixels."""
    return _image_net(width, outputs, lambda: Block(width), depth)


@dataclass(frozen=True)
class Split:
    """Inputs ``[n, inputs]`` and targets, labels ``[n]`` or numbers ``[n, 1]``."""

    x: Tensor
    y: Tensor

    @property
    def outputs(self) -> int:
        """Number of classes, or 1."""
        return 1 if self.y.is_floating_point() else int(self.y.max()) + 1

    def part(self, rows: slice) -> "Split":
        """Some rows."""
        return Split(self.x[rows], self.y[rows])


@dataclass(frozen=True)
class Host:
    """A network, its data and its circumstances.

    Attributes:
        data: makes the samples, in random order: of training, ``VALIDATION`` and the test ones.
        data_name: what the data are.
        samples: number of training samples.
        width, depth: of the hidden layers.
        epochs: number of epochs to train.
        price: of a network e times as large, as a share of the score.
        training_price: of a training of e times the operations, which is paid once.
        trained: whether it arrives trained, see ``training.arrival``.
        seed: of weights and minibatches.
    """

    architecture: Architecture = field(repr=False)
    data: Callable[[], Split] = field(repr=False)
    data_name: str
    samples: int
    width: int
    depth: int
    epochs: int
    price: float
    training_price: float
    trained: bool
    seed: int

    def build(self, data: Split, factor: float = 1.0, seed: int = 0) -> nn.Module:
        """The network with layers ``factor`` times as wide."""
        torch.manual_seed(self.seed + 7919 * seed)
        width = self.width + round(self.width * (factor - 1.0))  # as layers are widened
        return self.architecture(data.x.shape[1], width, self.depth, data.outputs)


def wrong_labels(y: Tensor, share: float, samples: int, draws: np.random.Generator) -> Tensor:
    """``y`` with a share of the first labels drawn anew."""
    classes, y = int(y.max()) + 1, y.clone()
    wrong = torch.from_numpy(draws.random(samples) < share)
    y[:samples][wrong] = torch.from_numpy(draws.integers(classes, size=int(wrong.sum())))
    return y


def drawn_circumstances(
    draws: np.random.Generator, is_image: bool, is_trained: bool
) -> dict[str, Any]:
    """Width, depth, epochs and prices of a host, see ``Host``."""
    return {
        "width": round(log_uniform(draws, 2, 10 if is_image else 32)),
        "depth": int(draws.integers(1, 4)),
        "epochs": round(log_uniform(draws, *((3, 20) if is_trained else (15, 60)))),
        "price": log_uniform(draws, 0.003, 0.1),
        "training_price": log_uniform(draws, 0.0003, 0.01),
        "trained": is_trained,
    }
