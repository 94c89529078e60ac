"""The hosts of ``widening.py``: small networks and their data, drawn too small or large enough."""

import argparse
import calendar
import csv
import heapq
import inspect
import io
import json
import keyword
import queue
import random
import shelve
import statistics
import textwrap
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from time import process_time

import torch
from sklearn.datasets import load_digits, make_friedman1
from torch import Tensor, nn

import esper
from esper_lab.capacity.training import counted_operations
from esper_lab.data import mnist1d

EPOCHS, BATCH, TRAIN, VALIDATION = 40, 50, 1000, 300
RATES = (0.003, 0.01, 0.03)
TUNING, SEEDS = range(100, 105), range(10)
CONTEXT = 32


def perceptron(inputs: int, width: int, outputs: int) -> nn.Module:
    """Two hidden layers."""
    layers = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def normed(norm: Callable[[int], nn.Module], inputs: int, width: int, outputs: int) -> nn.Module:
    """Two hidden layers with a norm of their units before each activation."""
    layers = (
        nn.Linear(inputs, width), norm(width), nn.ReLU(), nn.Linear(width, width), norm(width),
        nn.ReLU(),
    )  # fmt: skip
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def normed_convolutions(inputs: int, width: int, outputs: int) -> nn.Module:
    """Two convolutions with a norm of all channels of the map."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(1, width),
        nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(1, width),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs),
    )  # fmt: skip


def convolutions(inputs: int, width: int, outputs: int) -> nn.Module:
    """Two convolutions with batch norm."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width),
        nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs),
    )  # fmt: skip


def signal_convolutions(inputs: int, width: int, outputs: int) -> nn.Module:
    """Three convolutions with batch norm over a signal, each of which halves its length."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, inputs))]
    for channels in (1, width, width):
        layers += [nn.Conv1d(channels, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, outputs))


class Residual(nn.Module):
    """A block of two convolutions that adds to what it is given."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` to the same shape."""
        inner = self.norm1(self.conv1(x)).relu()
        return (x + self.norm2(self.conv2(inner))).relu()


def residual(depth: int, width: int = 8) -> nn.Module:
    """Residual blocks on digits."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width),
        nn.ReLU(), nn.Sequential(*(Residual(width) for _ in range(depth))),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


class Reader(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self, inputs: int, width: int, outputs: int, norm: bool = False):
        super().__init__()
        self.lstm = nn.LSTM(inputs // 8, width, batch_first=True)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to logits ``[B, outputs]``."""
        return self.head(self.norm(self.lstm(x.unflatten(1, (8, -1)))[1][0][0]))


class Chain(nn.Module):
    """An LSTM that reads what another makes of an image row by row."""

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.first = nn.LSTM(inputs // 8, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to logits ``[B, outputs]``."""
        return self.head(self.second(self.first(x.unflatten(1, (8, -1)))[0])[1][0][0])


class BothWays(nn.Module):
    """An LSTM of both directions over the rows of an image."""

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.lstm = nn.LSTM(inputs // 8, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to logits ``[B, outputs]``."""
        return self.head(self.lstm(x.unflatten(1, (8, -1)))[0].mean(1))


class Mixer(nn.Module):
    """Two blocks over the 16 patches of an image: an MLP along these, then one along channels."""

    def __init__(self, _: int, width: int, outputs: int):
        super().__init__()
        self.patches, self.head = nn.Linear(4, width), nn.Linear(width, outputs)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.tokens = nn.ModuleList(self.inner(16, width) for _ in range(2))
        self.channels = nn.ModuleList(self.inner(width, width) for _ in range(2))

    @staticmethod
    def inner(size: int, width: int) -> nn.Module:
        """An MLP of one hidden layer."""
        return nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, size))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 64]`` to logits ``[B, outputs]`` (Tolstikhin et al., 2021)."""
        x = x.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x = self.patches(x)
        for number in range(2):
            x = x + self.tokens[number](self.norms[2 * number](x).mT).mT
            x = x + self.channels[number](self.norms[2 * number + 1](x))
        return self.head(self.norms[4](x).mean(1))


class AttentiveReader(nn.Module):
    """An LSTM over the rows of an image, and a query that asks for some of its states."""

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.lstm = nn.LSTM(inputs // 8, width, batch_first=True)
        self.query, self.head = nn.Linear(inputs, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to logits ``[B, outputs]``."""
        states = self.lstm(x.unflatten(1, (8, -1)))[0]
        weights = (states @ self.query(x)[:, :, None]).softmax(1)
        return self.head((weights * states).sum(1))


class Experts(nn.Module):
    """Four experts whose weights are parameters of three axes; each sample goes to the best two."""

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.embed, self.head = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.router = nn.Linear(inputs, 4)
        self.inner, self.outer = (
            nn.Parameter((torch.rand(4, width, width) * 2 - 1) / width**0.5) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to logits ``[B, outputs]``."""
        scores, stream = self.router(x), self.embed(x).relu()
        best = scores >= scores.topk(2, 1).values[:, -1:]
        shares = scores.masked_fill(~best, float("-inf")).softmax(1)
        inner = torch.einsum("bd,edh->beh", stream, self.inner).relu()
        outer = torch.einsum("beh,ehd->bed", inner, self.outer)
        return self.head(stream + (shares[..., None] * outer).sum(1))


class Factors(nn.Module):
    """Entries of a matrix as products of a vector for each row and one for each column."""

    def __init__(self, _: int, width: int, __: int):
        super().__init__()
        self.rows, self.columns = nn.Embedding(1797, width), nn.Embedding(64, width)
        self.levels = nn.Embedding(64, 1)
        for table in self.rows, self.columns:
            nn.init.normal_(table.weight, std=0.5 * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Rows and columns ``[B, K, 2]`` to entries ``[B, K]``."""
        products = self.rows(x[..., 0]) * self.columns(x[..., 1])
        return products.sum(-1) + self.levels(x[..., 1])[..., 0]


class Towers(nn.Module):
    """Tells whether two images show the same digit, by the product of a vector for each."""

    def __init__(self, inputs: int, width: int, _: int):
        super().__init__()
        one, two = (perceptron(inputs // 2, width, width) for _ in range(2))
        self.one, self.two, self.level = one, two, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to logits ``[B]``."""
        one, two = x.chunk(2, 1)
        return (self.one(one) * self.two(two)).sum(1) + self.level


class Tagger(nn.Module):
    """An LSTM that reads bytes and tags each."""

    def __init__(self, inputs: int, width: int, outputs: int, embedding: int = 16):
        super().__init__()
        self.bytes = nn.Embedding(256, embedding)
        self.lstm = nn.LSTM(embedding, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to logits ``[B, T, outputs]``."""
        return self.head(self.lstm(self.bytes(x))[0])


def vision_transformer(inputs: int, width: int, outputs: int) -> nn.Module:
    """Two layers over the 16 patches of an image, of width 8; ``width`` is that of their MLPs."""
    del inputs
    layer = nn.TransformerEncoderLayer(8, 2, width, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 2, 2), nn.Flatten(2), PatchPlaces(),
        nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False),
        nn.Flatten(), nn.Linear(16 * 8, outputs),
    )  # fmt: skip


class PatchPlaces(nn.Module):
    """Adds to each patch what tells its place."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, T]`` to ``[B, T, C]``."""
        return x.transpose(1, 2) + self.places


class Transformer(nn.Module):
    """Two of torch's layers, with heads of width 4 and an MLP as wide as the stream."""

    def __init__(
        self, embedding: nn.Module, count: int, width: int, outputs: int, norm_first: bool = False
    ) -> None:
        super().__init__()
        self.embedding, self.is_tagger = embedding, isinstance(embedding, nn.Embedding)
        self.places = nn.Parameter(0.1 * torch.randn(count, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 4, width, 0.0, batch_first=True, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, ...]`` to logits ``[B, outputs]``, or of each token of a text."""
        x = self.layers(self.embedding(x) + self.places)
        return self.head(x if self.is_tagger else x.mean(1))


def image_transformer(inputs: int, width: int, outputs: int) -> nn.Module:
    """Reads an image as 16 tokens; norms are behind the sums, as torch has them by default."""
    embedding = nn.Sequential(nn.Unflatten(1, (16, inputs // 16)), nn.Linear(inputs // 16, width))
    return Transformer(embedding, 16, width, outputs)


def text_transformer(inputs: int, width: int, outputs: int) -> nn.Module:
    """Tags bytes; norms are before the layers."""
    return Transformer(nn.Embedding(256, width), inputs, width, outputs, norm_first=True)


class TiedGpt(nn.Module):
    """Predicts the next byte; the head shares the table of the embedding."""

    def __init__(self, _: int, width: int, __: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 4, width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for table in self.bytes, self.places:
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to logits ``[B, T, 256]``."""
        h = self.bytes(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h))


class Layer(nn.Module):
    """A causal pre-norm block of width 32 with two heads and an MLP."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.hidden, self.last = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, 32]`` to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.last(nn.functional.gelu(self.hidden(self.norm2(x))))


class Gpt(nn.Module):
    """Predicts the next byte."""

    def __init__(self, depth: int, width: int = 128):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, 32), nn.Embedding(CONTEXT, 32)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 256)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to logits ``[B, T, 256]``."""
        h = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def text_windows(seed: int) -> tuple[Tensor, Tensor]:
    """Windows of the documentation and the byte after each of their bytes."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    stream = torch.tensor(list(b"".join(page.read_bytes() for page in pages)))
    windows = stream[: len(stream) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:2800]
    return windows[order, :-1], windows[order, 1:]


@cache
def tagged_bytes() -> tuple[Tensor, Tensor]:
    """The bytes of modules of the standard library, and the kind of token of each.

    0 is white space, 1 a name, 2 a keyword, 3 an operator, 4 a number, 5 a string, 6 a comment.
    """
    kinds = {tokenize.OP: 3, tokenize.NUMBER: 4, tokenize.STRING: 5, tokenize.COMMENT: 6}
    contents, tags = list[bytes](), list[Tensor]()
    for module in argparse, calendar, csv, heapq, json, queue, random, shelve, statistics, textwrap:
        text = inspect.getsource(module).encode("ascii", "replace")
        starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
        tag = torch.zeros(len(text), dtype=torch.long)
        for each in tokenize.tokenize(io.BytesIO(text).readline):
            first, last = (starts[row - 1] + column for row, column in (each.start, each.end))
            name = 1 + keyword.iskeyword(each.string) if each.type == tokenize.NAME else 0
            tag[max(first, 0) : last] = kinds.get(each.type, name)
        contents.append(text)
        tags.append(tag)
    return torch.tensor(list(b"".join(contents))), torch.cat(tags)


def source_windows(seed: int) -> tuple[Tensor, Tensor]:
    """Windows of source code, and the kind of token of each byte."""
    x, y = (z[: len(z) // CONTEXT * CONTEXT].view(-1, CONTEXT) for z in tagged_bytes())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:2800]
    return x[order], y[order]


def noisy_digits(seed: int) -> tuple[Tensor, Tensor]:
    """Digits with noise of half the range of a pixel."""
    data, generator = load_digits(), torch.Generator().manual_seed(seed)
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=generator)
    return (x + 0.5 * torch.randn(x.shape, generator=generator))[order], y[order]


def entries(seed: int) -> tuple[Tensor, Tensor]:
    """Pixels of digits, 40 a sample: image and number of each, and its value."""
    pixels = torch.tensor(load_digits().data, dtype=torch.float32)
    order = torch.randperm(pixels.numel(), generator=torch.Generator().manual_seed(seed))[:112_000]
    values = (pixels - pixels.mean()) / pixels.std()
    x, y = torch.stack([order // 64, order % 64], 1), values.flatten()[order]
    return x.view(-1, 40, 2), y.view(-1, 40)


def pairs(seed: int) -> tuple[Tensor, Tensor]:
    """Two digits a sample, and whether they are of the same class: one pair in two is.

    Images of the training samples are in no other samples.
    """
    data, generator = load_digits(), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.data), generator=generator)
    x, y = (
        torch.tensor(data.data, dtype=torch.float32)[order] / 16,
        torch.tensor(data.target)[order],
    )
    part = torch.arange(2800) >= TRAIN
    first = torch.where(part, 1000, 0) + torch.randint(797, (2800,), generator=generator)
    same = torch.rand(2800, generator=generator) < 0.5
    is_apart = (torch.arange(len(y)) >= 1000) == part[:, None]
    chances = ((y[first, None] == y) == same[:, None]) & is_apart
    second = torch.multinomial(chances.float(), 1, generator=generator)[:, 0]
    return torch.cat([x[first], x[second]], 1), same.float()


def signals(seed: int) -> tuple[Tensor, Tensor]:
    """MNIST-1D (Greydanus, 2020)."""
    data = mnist1d()
    x = torch.cat([data.train_images, data.validation_images, data.test_images]).flatten(1)
    y = torch.cat([data.train_labels, data.validation_labels, data.test_labels])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:2800]
    return x[order], y[order]


def skewed(seed: int) -> tuple[Tensor, Tensor]:
    """Friedman's function (1991), its target skewed by an exponential function."""
    x, y = make_friedman1(2800, noise=0.0, random_state=seed)
    target = torch.tensor((y - 14.0) / 5.0, dtype=torch.float32).exp()
    mean, deviation = target[:TRAIN].mean(), target[:TRAIN].std()
    return torch.tensor(x, dtype=torch.float32), ((target - mean) / deviation)[:, None]


@dataclass(frozen=True)
class Host:
    """A network and its data; the layers are drawn too small, or large enough."""

    make: Callable[[int, int, int], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    width: int
    loss: str = "cross_entropy"
    slots: tuple[str, ...] | None = None
    """Layers that become wider, where not all do: those whose width ``build`` changes."""

    def build(self, factor: float, seed: int) -> nn.Module:
        """The network with layers ``factor`` times as wide."""
        torch.manual_seed(seed)
        inputs = self.data(0)[0].shape[1]
        outputs = 10 if self.loss == "cross_entropy" else 1
        return self.make(inputs, round(factor * self.width), outputs)

    def train(
        self, model: nn.Module, seed: int, policy: str, epochs: int, rate: float
    ) -> dict[str, float]:
        """Train ``model``.

        Returns:
            figures on validation and test in percent, parameters, operations of training, trials
            included, and seconds of the processor, with validation after every epoch.
        """
        x, y = self.data(seed)
        splits = [slice(TRAIN), slice(TRAIN, TRAIN + VALIDATION), slice(TRAIN + VALIDATION, None)]
        loaders = [
            torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(x[part], y[part]),
                BATCH if number == 0 else len(x),
                shuffle=number == 0,
                generator=torch.Generator().manual_seed(seed),
            )
            for number, part in enumerate(splits)
        ]
        torch.manual_seed(seed)
        begin = process_time()
        with counted_operations() as operations:
            result = esper.grow(
                model, loaders[0], loaders[1], test_loader=loaders[2], policy=policy, epochs=epochs,
                loss=self.loss, seed=seed, progress=False, best_epoch=True, slots=self.slots,
                optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
                scheduler=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, epochs),
            )  # fmt: skip
        assert result.test is not None
        return {
            "validation": 100 * result.validation.figure, "test": 100 * result.test.figure,
            "parameters": result.parameters, "operations": sum(operations),
            "seconds": process_time() - begin,
        }  # fmt: skip


HOSTS = {
    "MLP of width 4, noisy digits": Host(perceptron, noisy_digits, 4),
    "MLP of width 4, skewed Friedman": Host(perceptron, skewed, 4, "mse"),
    "CNN of width 3, noisy digits": Host(convolutions, noisy_digits, 3),
    "MLP of width 32, noisy digits": Host(perceptron, noisy_digits, 32),
    "LSTM of width 4, noisy digits": Host(Reader, noisy_digits, 4),
    "residual CNN of width 3, noisy digits": Host(
        lambda _, width, __: residual(2, width), noisy_digits, 3
    ),
    "ViT with MLPs of width 8, noisy digits": Host(
        vision_transformer, noisy_digits, 8, slots=("4.layers.0.linear1", "4.layers.1.linear1")
    ),
    "CNN of width 3, MNIST-1D": Host(signal_convolutions, signals, 3),
    "LSTM tagger of width 4, bytes": Host(Tagger, source_windows, 4, slots=("lstm",)),
    "GPT with MLPs of width 16, bytes": Host(lambda _, width, __: Gpt(2, width), text_windows, 16),
}
NORMED_HOSTS = {
    "MLP with layer norms, noisy digits": Host(partial(normed, nn.LayerNorm), noisy_digits, 4),
    "MLP with layer norms, skewed Friedman": Host(partial(normed, nn.LayerNorm), skewed, 4, "mse"),
    "MLP with RMS norms, noisy digits": Host(partial(normed, nn.RMSNorm), noisy_digits, 4),
    "CNN with norms of all channels, noisy digits": Host(normed_convolutions, noisy_digits, 4),
    "LSTM with a layer norm, noisy digits": Host(partial(Reader, norm=True), noisy_digits, 4),
    "transformer, noisy digits": Host(image_transformer, noisy_digits, 4),
    "transformer tagger, bytes": Host(text_transformer, source_windows, 4),
    "GPT with a tied head, bytes": Host(TiedGpt, text_windows, 4),
}
"""Of width 4, behind norms that see all channels; those of the LSTM are copied."""
RECURRENT_HOSTS: dict[str, tuple[Host, tuple[str, ...]]] = {
    "LSTM behind an LSTM, noisy digits": (Host(Chain, noisy_digits, 4), ("second",)),
    "LSTM of both directions, noisy digits": (Host(BothWays, noisy_digits, 4), ()),
    "LSTM tagger, embedding of 16, bytes": (
        Host(lambda i, width, o: Tagger(i, width, o, 16 if width == 4 else 32), source_windows, 4),
        ("lstm",),
    ),
    "LSTM tagger, embedding of 4, bytes": (
        Host(lambda i, width, o: Tagger(i, width, o, width), source_windows, 4), ("lstm",),
    ),
}  # fmt: skip
"""Of width 4, and the layers of each that became wider before what recurrent layers read did."""
PRODUCT_HOSTS: dict[str, tuple[Host, tuple[str, ...]]] = {
    "factors of a matrix, pixels of digits": (Host(Factors, entries, 4, "mse"), ()),
    "two towers, pairs of digits": (
        Host(Towers, pairs, 4, "binary_cross_entropy"), ("one.0", "one.2", "two.0", "two.2"),
    ),
    "LSTM with a query, noisy digits": (Host(AttentiveReader, noisy_digits, 4), ()),
    "MLP-Mixer, noisy digits": (
        Host(Mixer, noisy_digits, 4),
        ("tokens.0.0", "tokens.1.0", "channels.0.0", "channels.1.0"),
    ),
}  # fmt: skip
"""The same of hosts that multiply channels with others and sum the products, or that have layers
along another axis."""
OWN_HOSTS: dict[str, tuple[Host, tuple[str, ...]]] = {
    "mixture of experts, noisy digits": (Host(Experts, noisy_digits, 4), ())
}
"""The same of hosts with weights that are parameters of their own."""
GROWN = {"MLP of width 32, noisy digits": 1.5}
"""How many times as wide the prior makes a host; eight times by default."""
Arm = Callable[[int, float], dict[str, float]]
"""Result by seed and rate."""


def best_rate(arm: Arm, seeds: range = TUNING) -> float:
    """The rate at which the mean on validation is highest."""
    means = {rate: fmean(arm(seed, rate)["validation"] for seed in seeds) for rate in RATES}
    return max(means, key=means.__getitem__)


def tuned(arm: Arm, seeds: range = SEEDS, others: range = TUNING) -> list[dict[str, float]]:
    """Results of an arm on all seeds, at the rate that is best on validation on others."""
    rate = best_rate(arm, others)
    return [arm(seed, rate) | {"rate": rate} for seed in seeds]


def from_scratch(
    host: Host, times: float, policy: str, epochs: int, seed: int, rate: float
) -> dict[str, float]:
    """Train a network with layers ``times`` as wide as those of the host; see ``Host.train``."""
    return host.train(host.build(times, seed), seed, policy, epochs, rate)
