"""Modules as people write them, which the benchmarks of own models train and grow."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """The basic block of ResNet-18 (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
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

    def forward(self, x: Tensor) -> Tensor:
        """The activation after the block."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """ResNet-18 with the stem for small images, of 3x3 pixels and without pooling.

    Args:
        width: channels of the first stage; 64 in the paper.
        inputs: channels of an image.
    """

    def __init__(self, width: int = 64, inputs: int = 3):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, 1, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(Block(a, b, 1 if i == 0 else 2), Block(b, b, 1))
            for i, (a, b) in enumerate(pairwise(widths))
        )
        self.fc = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, 10]`` of images ``[B, inputs, H, W]``."""
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.layer4(self.layer3(x)).mean((2, 3)))


class ResidualNet(nn.Module):
    """Two residual blocks of ``width`` and twice as many channels, and dropout."""

    def __init__(self, width: int):
        super().__init__()
        self.block1, self.block2 = Block(1, width, 1), Block(width, 2 * width, 2)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, 10]`` of images ``[B, 1, H, W]``."""
        x = self.block2(self.block1(x))
        return self.head(self.dropout(x.mean((2, 3))))


def convolutional(width: int) -> nn.Sequential:
    """Two convolutions with BatchNorm, of ``width`` and twice as many channels."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def perceptron(width: int) -> nn.Sequential:
    """Two hidden layers of ``width`` units, and dropout; 10 numbers in, one out."""
    return nn.Sequential(
        nn.Linear(10, width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 1),
    )


class GptBlock(nn.Module):
    """Causal attention and a perceptron, each behind a LayerNorm (Radford et al., 2019)."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The activation ``[B, T, width]`` after the block."""
        query, key, value = self.joint(self.norm1(x)).unflatten(-1, (3, 4, -1)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class Gpt(nn.Module):
    """A language model of bytes with two blocks; embedding and head share their weights."""

    def __init__(self, width: int, context: int, vocabulary: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(GptBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, vocabulary]`` of the next bytes of ``[B, T]``."""
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
