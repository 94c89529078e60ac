"""Grow a pretrained network on data that changed: `python examples/own_pretrained.py`.

The network was trained on digits in the middle of the image. On shifted digits its convolutions
stay as they are, and only its head and the seeds learn.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.runtime.data import digits


def network():
    backbone = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    )
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(backbone, pool, nn.Linear(16, 10))


def loaders(shift):
    data = digits(shift=shift, noise=0.1)
    chosen = torch.randperm(len(data.train_images))[:1200]
    parts = (
        (data.train_images[chosen], data.train_labels[chosen]),
        (data.validation_images, data.validation_labels),
        (data.test_images, data.test_labels),
    )
    sets = [TensorDataset(images.movedim(-1, 1), labels) for images, labels in parts]
    return [DataLoader(part, batch_size=64, shuffle=i == 0) for i, part in enumerate(sets)]


def pretrained(epochs):
    model, (train, validation, _) = network(), loaders(shift=0)
    make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    esper.grow(
        model, train, validation, policy="never", epochs=epochs, optimizer=make, progress=False
    )
    return model


def main(epochs=40, before=20):
    torch.manual_seed(0)
    model = pretrained(before)
    backbone = model[0]
    backbone.requires_grad_(False)
    # In evaluation mode BatchNorm keeps the statistics that it learned.
    backbone.eval()
    kept = {name: value.clone() for name, value in backbone.state_dict().items()}
    train, validation, test = loaders(shift=2)
    result = esper.grow(
        model,
        train,
        validation,
        slots=["0.2", "0.6"],
        policy="rule",
        epochs=epochs,
        test_loader=test,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in kept.items())
    print(result.seeds, f"test accuracy {100 * result.test.accuracy:.1f} %")
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
