"""Hosts whose width was drawn, their data and their trainings: what ``capacity_page.py`` plays.

A host is a network with layers of a drawn width, a drawn number of noisy samples, a price of
parameters, and a number of epochs; half of the hosts arrive trained. A plan says by which factors
all hidden layers become wider, and when. Trainings are plain loops with Adam, a cosine schedule and
the operators of ``esper.grow``; their cost is counted in operations.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from esper.kasmina import width_prior
from esper.kasmina.channel_groups import channel_groups
from esper.kasmina.wider_layers import parameter_count, widen
from esper.own_models.new_units import BATCHES, propose
from esper.own_models.width_search import BEGIN

BATCH, VALIDATION, TEST = 50, 300, 2000
RATE, AGAIN = 0.005, 0.4
FACTORS = 1.0, *width_prior.FACTORS
RATES = 0.002, 0.015, 0.04
"""Further rates, where each arm chooses its own by validation."""
PRETRAINING = 40
SHARE = 0.3
"""Of its weights that a trained network keeps where it is shrunk."""


def perceptron(inputs: int, width: int, depth: int, outputs: int) -> nn.Module:
    """``depth`` hidden layers."""
    sizes = [inputs, *[width] * depth]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _norm(inputs: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def convolutions(inputs: int, width: int, depth: int, outputs: int) -> nn.Module:
    """``depth`` convolutions on images of 8 x 8 pixels."""
    del inputs
    layers = [nn.Unflatten(1, (1, 8, 8)), *_norm(1, width), nn.MaxPool2d(2)]
    for _ in range(depth - 1):
        layers += _norm(width, width)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs))


class Block(nn.Module):
    """Two convolutions that add to what they are given."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(*_norm(width, width), *_norm(width, width)[:2])

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` to the same shape."""
        return (x + self.inner(x)).relu()


def residual(inputs: int, width: int, depth: int, outputs: int) -> nn.Module:
    """``depth`` residual blocks on images of 8 x 8 pixels."""
    del inputs
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *_norm(1, width), nn.MaxPool2d(2),
        *(Block(width) for _ in range(depth)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs),
    )  # fmt: skip


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
        architecture: makes the network from inputs, width, depth and outputs.
        data: makes the samples, in random order: of training, ``VALIDATION`` and the test ones.
        data_name: what the data are.
        samples: number of training samples.
        width, depth: of the hidden layers.
        epochs: number of epochs to train.
        price: of a network e times as large, as a share of the score.
        trained: whether it arrives trained, for ``PRETRAINING`` epochs.
        seed: of weights and minibatches.
    """

    architecture: Callable[[int, int, int, int], nn.Module] = field(repr=False)
    data: Callable[[], Split] = field(repr=False)
    data_name: str
    samples: int
    width: int
    depth: int
    epochs: int
    price: float
    trained: bool
    seed: int

    def build(self, data: Split, factor: float = 1.0, seed: int = 0) -> nn.Module:
        """The network with layers ``factor`` times as wide."""
        torch.manual_seed(self.seed + 7919 * seed)
        width = round(factor * self.width)
        return self.architecture(data.x.shape[1], width, self.depth, data.outputs)


@dataclass(frozen=True)
class Plan:
    """By how much all hidden layers become wider.

    Attributes:
        first, second: factors after ``BEGIN`` and ``AGAIN`` of the epochs, of a trained host at
            once and never.
        shrunk: whether the weights are shrunk first, see ``esper.shrink_and_perturb``.
        static: factor of the width from the start; the network is a fresh one then.
    """

    first: float = 1.0
    second: float = 1.0
    shrunk: bool = False
    static: float = 0.0


STATICS = tuple(Plan(static=factor) for factor in FACTORS)
SEQUENCES = (
    *(Plan(factor) for factor in FACTORS),
    *(Plan(1.0, factor) for factor in (2.0, 4.0)),
    *(Plan(1.5, factor) for factor in (2.0, 4.0)),
    *(Plan(2.0, factor) for factor in (2.0, 4.0)),
    Plan(4.0, 2.0),
)
"""What a host from scratch can do."""
IN_PLACE = (
    *(Plan(factor) for factor in FACTORS),
    *(Plan(factor, shrunk=True) for factor in FACTORS),
)
"""What a trained host can do."""


@dataclass(frozen=True)
class Result:
    """What a training came to.

    Attributes:
        validation, test: accuracy or R² (at least 0), as shares.
        parameters: of the network in the end.
        operations: multiplications and additions of training.
    """

    validation: float
    test: float
    parameters: int
    operations: float


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, or squared error of numbers."""
    if y.is_floating_point():
        return nn.functional.mse_loss(output, y)
    return nn.functional.cross_entropy(output, y)


@torch.no_grad()
def score(model: nn.Module, data: Split) -> float:
    """Accuracy, or R² (at least 0)."""
    model.eval()
    output = torch.cat([model(x) for x in data.x.split(500)])
    model.train()
    if not data.y.is_floating_point():
        return float((output.argmax(1) == data.y).double().mean())
    rest = (output - data.y).square().mean() / (data.y - data.y.mean()).square().mean()
    return max(0.0, 1.0 - float(rest))


def operations_of(model: nn.Module, x: Tensor) -> float:
    """Operations of a training step per sample: a forward pass, and a backward pass of twice it."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x[:BATCH])
    return 3.0 * counter.get_total_flops() / len(x[:BATCH])


def widened(
    model: nn.Module, factor: float, train: Split, optimizer: torch.optim.Optimizer, seed: int
) -> float:
    """Make every hidden layer ``factor`` times as wide; operations that the choice took."""
    if factor == 1.0:
        return 0.0
    model.eval()
    groups, _ = channel_groups(model, lambda: model(train.x[:4]))
    model.train()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(train.x), generator=generator)[: BATCH * BATCHES].split(BATCH)
    batches = [(train.x[part], train.y[part]) for part in rows]

    def backward(network: nn.Module, batch: Any) -> None:
        loss_of(network(batch[0]), batch[1]).backward()

    operations = 0.0
    for group in groups:
        count = round(group.channels * (factor - 1.0))
        operations += BATCHES * BATCH * operations_of(model, train.x)
        if count:
            new = propose(model, group, count, batches, backward, generator).new
            widen(model, group, new, optimizer)
    return operations


def train(
    model: nn.Module,
    data: Split,
    samples: int,
    epochs: int,
    seed: int,
    factors: dict[int, float] | None = None,
    rate: float = RATE,
    curve: list[list[float]] | None = None,
) -> Result:
    """Train ``model`` in place; ``factors`` say by how much it becomes wider before an epoch.

    Of each epoch ``curve`` gets the losses on training, while it learned, and on validation, and
    the score on validation.
    """
    parts = data.part(slice(samples)), data.part(slice(samples, samples + VALIDATION))
    test = data.part(slice(samples + VALIDATION, None))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    per_sample = operations_of(model, parts[0].x)
    operations = 0.0
    for epoch in range(epochs):
        if factors and epoch in factors:
            operations += widened(model, factors[epoch], parts[0], optimizer, seed + epoch)
            per_sample = operations_of(model, parts[0].x)
        losses = []
        for rows in torch.randperm(samples, generator=generator).split(BATCH):
            if len(rows) < 2:  # too few for a batch norm
                continue
            optimizer.zero_grad()
            loss = loss_of(model(parts[0].x[rows]), parts[0].y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        schedule.step()
        operations += samples * per_sample
        if curve is not None:
            with torch.no_grad():
                model.eval()
                held_out = loss_of(model(parts[1].x), parts[1].y)
                model.train()
            row = float(torch.stack(losses).mean()), float(held_out), score(model, parts[1])
            curve.append(list(row))
    return Result(score(model, parts[1]), score(model, test), parameter_count(model), operations)


def outcomes(host: Host, orders: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    """All plans of a host, in one or two orders of its data; static networks in the first."""
    data, small = _arrival(host)
    plans = IN_PLACE if host.trained else SEQUENCES
    columns = [
        [vars(_played(host, data, small, plan, order)) for plan in plans] for order in orders
    ]
    statics = [vars(_played(host, data, small, plan, orders[0])) for plan in STATICS]
    circumstances = {
        name: getattr(host, name)
        for name in ("data_name", "samples", "width", "depth", "epochs", "price", "trained")
    }
    return circumstances | {
        "architecture": host.architecture.__name__,
        "inputs": data.x.shape[1],
        "outputs": data.outputs,
        "parameters": parameter_count(small),
        "validation": score(small, data.part(slice(host.samples, host.samples + VALIDATION))),
        "training": score(small, data.part(slice(host.samples))),
        "plans": columns,
        "statics": statics,
    }


def looks(host: Host) -> list[list[list[float]]]:
    """The curves of training at each of ``FACTORS``, in the first order of the data."""
    data, small = _arrival(host)
    curves: list[list[list[float]]] = [[] for _ in FACTORS]
    for factor, curve in zip(FACTORS, curves, strict=True):
        _played(host, data, small, Plan(factor), 1, curve)
    return curves


def _arrival(host: Host) -> tuple[Split, nn.Module]:
    """The data of a host, and its network as it arrives."""
    data = host.data()
    small = host.build(data)
    if host.trained:
        train(small, data, host.samples, PRETRAINING, host.seed)
    return data, small


def _played(
    host: Host,
    data: Split,
    small: nn.Module,
    plan: Plan,
    order: int,
    curve: list[list[float]] | None = None,
) -> Result:
    seed = 1000 * order + host.seed
    if plan.static:
        model = host.build(data, plan.static, order)
        return train(model, data, host.samples, host.epochs, seed)
    if plan.shrunk:
        model = esper.shrink_and_perturb(small, host.build(data, seed=order), SHARE)
    elif host.trained:
        model = deepcopy(small)
    else:
        model = host.build(data, seed=order)
    first = 0 if host.trained else max(1, round(BEGIN * host.epochs))
    second = max(first + 1, round(AGAIN * host.epochs))
    factors = {second: plan.second, first: plan.first}
    return train(model, data, host.samples, host.epochs, seed, factors, curve=curve)


def utility(result: dict[str, Any], host: dict[str, Any], split: str = "test") -> float:
    """A score minus the price of the parameters above those of the host, as a share."""
    growth = max(1.0, result["parameters"] / host["parameters"])
    return float(result[split]) - float(host["price"]) * math.log(growth)


def further(host: Host) -> dict[str, Any]:
    """What a sceptic runs first, in the first order of the data.

    Of a host from scratch the static networks trained for a fifth of the epochs (all of them take
    as long as one training); of a trained one, all statics and all widenings in place at ``RATES``.
    """
    data, small = _arrival(host)
    seed = 1000 + host.seed
    epochs = host.epochs if host.trained else max(1, round(host.epochs / len(FACTORS)))

    def statics(rate: float = RATE) -> list[dict[str, Any]]:
        models = (host.build(data, factor, 1) for factor in FACTORS)
        return [vars(train(m, data, host.samples, epochs, seed, rate=rate)) for m in models]

    if not host.trained:
        return {"short": statics()}
    in_place = [
        [
            vars(train(deepcopy(small), data, host.samples, epochs, seed, {0: factor}, rate))
            for factor in FACTORS
        ]
        for rate in RATES
    ]
    return {"statics": [statics(rate) for rate in RATES], "in_place": in_place}


def wrong_labels(y: Tensor, share: float, samples: int, draws: np.random.Generator) -> Tensor:
    """``y`` with a share of the first labels drawn anew."""
    classes, y = int(y.max()) + 1, y.clone()
    wrong = torch.from_numpy(draws.random(samples) < share)
    y[:samples][wrong] = torch.from_numpy(draws.integers(classes, size=int(wrong.sum())))
    return y


def log_uniform(draws: np.random.Generator, low: float, high: float) -> float:
    """A number whose logarithm is uniform."""
    return float(np.exp(draws.uniform(math.log(low), math.log(high))))
