"""Grow a convolutional network of your own in one call: `python examples/own_cnn.py`."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import esper


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1, self.block2 = Block(1, 4, 1), Block(4, 8, 2)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(8, 10)

    def forward(self, x):
        x = self.block2(self.block1(x))
        return self.head(self.dropout(x.mean((2, 3))))


def loaders():
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    digits = TensorDataset(x.float().view(-1, 1, 8, 8) / 16, y)
    parts = random_split(digits, [1197, 300, 300], torch.Generator().manual_seed(0))
    return [DataLoader(part, batch_size=64, shuffle=i == 0) for i, part in enumerate(parts)]


def main(epochs=40):
    torch.manual_seed(0)
    train, validation, test = loaders()
    esper.check(Net(), train)
    result = esper.grow(
        Net(),
        train,
        validation,
        policy="rule",
        epochs=epochs,
        test_loader=test,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
    )
    print(result.seeds, f"test accuracy {100 * result.test.accuracy:.1f} %")
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
