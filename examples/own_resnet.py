"""Grow ResNet-18, narrowed to digits: `python examples/own_resnet.py`."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import esper


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """As in torchvision, with names as there; width 64 is the usual one."""

    def __init__(self, width=64, inputs=3, classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, 1, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.layer1 = self.stage(width, width, 1)
        self.layer2 = self.stage(width, 2 * width, 2)
        self.layer3 = self.stage(2 * width, 4 * width, 2)
        self.layer4 = self.stage(4 * width, 8 * width, 2)
        self.fc = nn.Linear(8 * width, classes)

    def stage(self, inputs, outputs, stride):
        return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def loaders():
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    digits = TensorDataset(x.float().view(-1, 1, 8, 8) / 16, y)
    parts = random_split(digits, [1197, 300, 300], torch.Generator().manual_seed(0))
    return [DataLoader(part, batch_size=64, shuffle=i == 0) for i, part in enumerate(parts)]


def main(epochs=30, width=4):
    torch.manual_seed(0)
    train, validation, test = loaders()
    result = esper.grow(
        ResNet18(width, inputs=1, classes=10),
        train,
        validation,
        slots=["layer1", "layer2", "layer3"],
        policy="rule",
        epochs=epochs,
        test_loader=test,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
    )
    print(result.seeds, f"test accuracy {100 * result.test.accuracy:.1f} %")
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
