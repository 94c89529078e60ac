"""Without growth ``esper.grow`` is the plain loop, to the last bit."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from esper.own_models.growing import grow
from own_modules import Gpt, ResidualNet, images, loader, perceptron, table, tokens, unchanged

EPOCHS, BATCHES = 3, 4


def next_token(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def plain_loop(
    model: nn.Module,
    train: DataLoader,
    validation: DataLoader,
    loss: Callable[[Any, Tensor], Tensor],
    optimizer: Optimizer,
    scheduler: Any = None,
    clip: float | None = None,
) -> None:
    for _ in range(EPOCHS):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if isinstance(scheduler, OneCycleLR):
                scheduler.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            model.eval()
            with torch.random.fork_rng(), torch.no_grad():
                losses = [(loss(model(x), y) * len(x), len(x)) for x, y in validation]
            scheduler.step(sum(float(a) for a, _ in losses) / sum(b for _, b in losses))
        elif scheduler is not None and not isinstance(scheduler, OneCycleLR):
            scheduler.step()


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=3e-3, weight_decay=0.02)


def momentum(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


text = tokens(64)
CASES = {
    "residual": (ResidualNet, images(64), "cross_entropy", F.cross_entropy, {}),
    "clipped": (ResidualNet, images(64), "cross_entropy", F.cross_entropy, {"clip": 0.3}),
    "one cycle": (
        ResidualNet, images(64), "cross_entropy", F.cross_entropy,
        {"scheduler": partial(OneCycleLR, max_lr=0.02, total_steps=EPOCHS * BATCHES)},
    ),
    "cosine": (
        perceptron, table(64), "mse", F.mse_loss,
        {"scheduler": partial(CosineAnnealingLR, T_max=EPOCHS), "optimizer": momentum},
    ),
    "plateau": (
        perceptron, table(64), F.l1_loss, F.l1_loss,
        {"scheduler": partial(ReduceLROnPlateau, patience=0, threshold=0.9)},
    ),
    "language": (Gpt, (text[:, :-1], text[:, 1:]), "cross_entropy", next_token, {"clip": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_never_growing_is_the_plain_loop_bit_for_bit(case: str) -> None:
    build, data, loss, plain_loss, extra = CASES[case]
    extra = {"optimizer": adamw} | extra
    torch.manual_seed(3)
    model = build()
    twin = copy.deepcopy(model)
    train, held_back = loader(*data, shuffle=True), loader(*data, batch=40, shuffle=True)

    torch.manual_seed(4)
    made, schedule = extra["optimizer"](twin.parameters()), extra.get("scheduler")
    scheduler = schedule and schedule(made)
    plain_loop(twin, train, held_back, plain_loss, made, scheduler, extra.get("clip"))
    expected = torch.rand(1)

    torch.manual_seed(4)
    result = grow(
        model, train, held_back, loss=loss, epochs=EPOCHS, policy="never", progress=False, **extra
    )
    assert torch.equal(torch.rand(1), expected)
    assert result.model is model
    assert unchanged(model, twin.state_dict())
    assert len(result.history) == EPOCHS
    assert result.parameters == result.host_parameters
