"""The perceptron of ``widening.py``, grown by gromo (``pip install gromo``): TINY.

Verbockhaven, Rudkiewicz, Chevallier and Charpiat, "Growing tiny networks: spotting expressivity
bottlenecks and fixing them optimally" (2024). Its new units are the singular vectors of the part of
the gradient that no change of the present weights can follow; their scale comes from a line search.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EVENTS = 10
"""Growths of each layer, evenly spread from a tenth to the half of the training."""
SCALES = (0.03, 0.1, 0.3, 1.0)
"""Scales of new units among which the training loss decides."""

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": nn.functional.cross_entropy, "mse": nn.functional.mse_loss,
}  # fmt: skip


def train(
    x: Tensor,
    y: Tensor,
    train: slice,
    others: tuple[slice, slice],
    widths: tuple[int, int],
    loss_name: str,
    batch: int,
    epochs: int,
    seed: int,
    rate: float,
) -> dict[str, float]:
    """Train with Adam and cosine decay while both layers grow.

    Args:
        x, y: inputs ``[S, F]`` and targets of all splits.
        train: the samples that are trained on.
        others: those of validation and test.
        widths: width of both layers at first, and most units that they may have.
        loss_name: ``cross_entropy`` or ``mse``.
        batch: samples of a minibatch.
        epochs: epochs.
        seed: of weights and order.
        rate: learning rate at first.

    Returns:
        figures on validation and test in percent, parameters, seconds.
    """
    from gromo.containers.growing_mlp import GrowingMLP

    torch.manual_seed(seed)
    begin, loss = time.perf_counter(), LOSSES[loss_name]
    outputs = 10 if loss_name == "cross_entropy" else y.shape[1]
    model: Any = GrowingMLP(
        x.shape[1], outputs, widths[0], 2, nn.ReLU(), flatten=False, device="cpu"
    )
    inputs, targets = x[train], y[train]
    first = epochs // 10
    growths = {first + round(i * (epochs // 2 - first) / EVENTS) for i in range(EVENTS)}
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for epoch in range(epochs):
        if epoch in growths:
            for index in range(2):
                room = widths[1] - model.layers[index].out_features
                count = min(-(-(widths[1] - widths[0]) // EVENTS), room)
                if count > 0:
                    _grow(model, index, count, inputs, targets, loss, batch)
            optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for indices in torch.randperm(len(inputs)).split(batch):
            optimizer.zero_grad()
            loss(model(inputs[indices]), targets[indices]).backward()
            optimizer.step()
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        figures = [_figure(model(x[part]), y[part], loss_name) for part in others]
    parameters = sum(p.numel() for p in model.parameters())
    names = ("validation", "test", "parameters", "seconds")
    return dict(zip(names, (*figures, parameters, seconds), strict=True))


def _grow(model: Any, index: int, count: int, x: Tensor, y: Tensor, loss: Any, batch: int) -> None:
    """Add at most ``count`` units to a layer, by the statistics of all training samples."""
    model.set_growing_layers(index=index)
    model.init_computation()
    for inputs, targets in zip(x.split(batch), y.split(batch), strict=True):
        model.zero_grad()
        loss(model(inputs), targets).backward()
        model.update_computation()
    model.compute_optimal_updates(maximum_added_neurons=count, compute_delta=False)
    model.reset_computation()
    model.dummy_select_update()
    losses = {}
    for scale in SCALES:
        model.set_scaling_factor(scale)
        with torch.no_grad():
            losses[scale] = float(loss(model.extended_forward(x), y))
    model.set_scaling_factor(min(losses, key=losses.__getitem__))
    model.apply_change()


def _figure(outputs: Tensor, y: Tensor, loss_name: str) -> float:
    """Accuracy or R² in percent."""
    if loss_name == "cross_entropy":
        return 100 * float((outputs.argmax(1) == y).float().mean())
    return 100 * (1 - float((outputs - y).square().mean() / y.var(unbiased=False)))
