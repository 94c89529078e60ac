"""Small modules as users write them, and data for them."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, momentum=None)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            if stride > 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


class ResidualNet(nn.Module):
    """Two stages of two residual blocks, dropout, BatchNorm with and without momentum."""

    def __init__(self, width: int = 4, dropout: float = 0.1):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layer1 = nn.Sequential(ResidualBlock(width, width, 1), ResidualBlock(width, width, 1))
        self.layer2 = nn.Sequential(
            ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 2 * width, 1)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.stem(images))))
        return self.head(self.dropout(x.mean((2, 3))))


class ResNet18(nn.Module):
    """The ResNet-18 of torchvision: 11.7 million parameters for 1,000 classes."""

    def __init__(self, width: int = 64, classes: int = 1000):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for stage, (inputs, outputs) in enumerate(pairwise(widths), 1):
            blocks = (
                ResidualBlock(inputs, outputs, 1 if stage == 1 else 2),
                ResidualBlock(outputs, outputs, 1),
            )
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.head = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.head(x.mean((2, 3)))


class GptBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A language model with a tied head and a dict output."""

    def __init__(self, vocabulary: int = 12, width: int = 8, depth: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GptBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


class Recurrent(nn.Module):
    """An LSTM between an embedding and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True)
        self.head = nn.Linear(6, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def perceptron(inputs: int = 5, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, outputs),
    )  # fmt: skip


def unchanged(model: nn.Module, state: dict[str, Tensor]) -> bool:
    """Whether the module has exactly these numbers."""
    numbers = model.state_dict()
    return [*numbers] == [*state] and all(torch.equal(x, state[n]) for n, x in numbers.items())


def images(count: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images ``[count, 1, 8, 8]`` with one bright quarter, which is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    found = 0.3 * torch.randn(count, 1, 8, 8, generator=generator)
    for i, label in enumerate(labels.tolist()):
        top, left = 4 * (label // 2), 4 * (label % 2)
        found[i, 0, top : top + 4, left : left + 4] += 1.0
    return found, labels


def tokens(count: int = 48, seed: int = 0) -> Tensor:
    """Sequences ``[count, 9]`` in which the next token is the last plus one, modulo 12."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(12, (count, 1), generator=generator)
    return (first + torch.arange(9)) % 12


def table(count: int = 96, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Five features and a target ``[count, 1]`` that is not linear in them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3]) * 3.0


def loader(
    *tensors: Tensor, batch: int = 16, shuffle: bool = False
) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*tensors), batch, shuffle=shuffle)


SOURCE = """
from own_modules import ResidualNet, images, loader

def model():
    return ResidualNet()

def loaders():
    return loader(*images(48)), loader(*images(32, 1)), loader(*images(32, 2))
"""
"""A user's file with the network and the data of ``esper grow --model``."""
