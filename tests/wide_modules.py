"""Modules with layers that share channels in every way that can be widened."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from own_modules import Gpt, ResidualNet, images, tokens


class GatedNet(nn.Module):
    """A depthwise convolution and a gate by squeeze and excitation (Hu et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(1, 6, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.squeeze, self.excite = nn.Linear(6, 2), nn.Linear(2, 6)
        self.project, self.head = nn.Conv2d(6, 5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.depthwise(self.expand(x))))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3))))))
        return self.head(self.project(x * gate[:, :, None, None]).mean(dim=(-1, -2)))


class Tagger(nn.Module):
    """An LSTM with a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 8), nn.LSTM(8, 6, batch_first=True)
        self.hidden, self.head = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.lstm(self.embedding(x))[0])))


class Reader(nn.Module):
    """Two layers of gated units, whose last state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 5, 2, bias=False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.transpose(0, 1))[1][-1])


class Branches(nn.Module):
    """Two branches and the image itself side by side, with a norm and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 3, 1)
        self.norm, self.depthwise = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.join, self.head = nn.Conv2d(8, 5, 1), nn.Linear(5 + 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x).relu(), x, self.right(x)], dim=1)
        y = self.join(self.depthwise(self.norm(both).relu()))
        return self.head(torch.cat((y, both), 1).amax((2, 3)))


class Dense(nn.Module):
    """Layers that each read what all before them wrote (Huang et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 + 4 * i, 4) for i in range(3))
        self.head = nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([layer(x).relu(), x], -1)
        return self.head(x)


def flattening() -> nn.Module:
    """Convolutions whose maps are flattened."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 4, 10),
    )  # fmt: skip


def sequences() -> nn.Module:
    """Convolutions along time."""
    return nn.Sequential(
        nn.Conv1d(1, 3, 5, stride=2), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 4, 3), nn.SiLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 10),
    )  # fmt: skip


def multilayer() -> nn.Module:
    """A perceptron with dropout."""
    return nn.Sequential(
        nn.Linear(6, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def transformer() -> nn.Module:
    """A transformer of width 8 over patches of an image."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(5, 8), layers, nn.Flatten(), nn.Linear(8 * 4, 3))


HOSTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...]]] = {
    "perceptron": (multilayer, lambda: torch.randn(8, 6), ("0", "3")),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)),
        lambda: torch.randn(8, 6), ("0",),
    ),
    "branches": (Branches, lambda: torch.randn(8, 1, 8, 8), ("join", "left", "right")),
    "dense": (Dense, lambda: torch.randn(8, 6), ("layers.0", "layers.1", "layers.2")),
    "convolutions": (flattening, lambda: torch.randn(8, 1, 8, 8), ("0", "4")),
    "sequences": (sequences, lambda: torch.randn(8, 1, 40), ("0", "3")),
    "gated": (
        GatedNet, lambda: torch.randn(8, 1, 8, 8), ("expand + excite", "squeeze", "project"),
    ),
    "residual": (
        ResidualNet, lambda: images(8)[0],
        (
            "stem + layer1.0.conv2 + layer1.1.conv2", "layer1.0.conv1", "layer1.1.conv1",
            "layer2.0.conv1", "layer2.0.conv2 + layer2.0.shortcut.0 + layer2.1.conv2",
            "layer2.1.conv1",
        ),
    ),
    "transformer": (
        transformer, lambda: torch.randn(8, 4, 5), ("1.layers.0.linear1", "1.layers.1.linear1"),
    ),
    "language": (
        Gpt, lambda: tokens(8)[:, :-1], tuple(f"blocks.{i}.mlp.0" for i in range(3)),
    ),
    "tagger": (Tagger, lambda: torch.randint(9, (8, 5)), ("lstm", "hidden")),
    "reader": (Reader, lambda: torch.randn(8, 6, 4), ("gru",)),
}  # fmt: skip
"""By name: the module, inputs, and the groups of channels that can be widened."""
