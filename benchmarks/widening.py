"""Widening in mid-training, against networks that have the larger size from the start.

    python benchmarks/widening.py [--parts fresh gromo trained deep moment] [--write]

Every arm is ``esper.grow`` with Adam and cosine decay; ``never`` is the plain loop. Rates are tuned
for each arm alike, on other seeds, by validation, and every arm hands back the epoch that is best
on validation where it is better than the last by more than noise. Figures are test accuracy or R²
in percent.
"""

import argparse
import calendar
import csv
import heapq
import inspect
import io
import json
import keyword
import math
import queue
import random
import shelve
import statistics
import textwrap
import tokenize
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import tiny_growth
import torch
from reporting import kept, made_on, new_parser, publish, table
from sklearn.datasets import load_digits, make_friedman1
from torch import Tensor, nn

import esper
from esper.kasmina import wider_layers
from esper.own_models import layer_growth, width_search
from esper_lab.data import mnist1d

EPOCHS, BATCH, TRAIN, VALIDATION = 40, 50, 1000, 300
RATES = (0.003, 0.01, 0.03)
TUNING, SEEDS = range(100, 105), range(10)
MORE_TUNING, MORE_SEEDS = range(100, 120), range(200, 260)
SWEEP = (1, 2, 4, 6)
EXTRA = (3, 6, 12, 24)
SHARES = {"mild": 0.6, "shrunk": 0.3}
"""Of its weights that a trained network keeps before it grows, by arm."""
CONTEXT = 32
Z = 1.96


def perceptron(inputs: int, width: int, outputs: int) -> nn.Module:
    """Two hidden layers."""
    layers = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(width, outputs))


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

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.lstm = nn.LSTM(inputs // 8, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to logits ``[B, outputs]``."""
        return self.head(self.lstm(x.unflatten(1, (8, -1)))[1][0][0])


class Tagger(nn.Module):
    """An LSTM that reads bytes and tags each."""

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.bytes = nn.Embedding(256, 16)
        self.lstm = nn.LSTM(16, width, batch_first=True)
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

    def build(self, factor: float, seed: int) -> nn.Module:
        """The network with layers ``factor`` times as wide."""
        torch.manual_seed(seed)
        inputs = self.data(0)[0].shape[1]
        outputs = 10 if self.loss == "cross_entropy" else 1
        return self.make(inputs, round(factor * self.width), outputs)

    def train(
        self, model: nn.Module, seed: int, policy: str, epochs: int, rate: float
    ) -> dict[str, float]:
        """Train ``model``; figures on validation and test in percent, parameters, seconds."""
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
        result = esper.grow(
            model, loaders[0], loaders[1], test_loader=loaders[2], policy=policy, epochs=epochs,
            loss=self.loss, seed=seed, progress=False, best_epoch=True,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
            scheduler=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, epochs),
        )  # fmt: skip
        assert result.test is not None
        return {
            "validation": 100 * result.validation.figure, "test": 100 * result.test.figure,
            "parameters": result.parameters, "seconds": result.seconds,
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
    "ViT with MLPs of width 8, noisy digits": Host(vision_transformer, noisy_digits, 8),
    "CNN of width 3, MNIST-1D": Host(signal_convolutions, signals, 3),
    "LSTM tagger of width 4, bytes": Host(Tagger, source_windows, 4),
    "GPT with MLPs of width 16, bytes": Host(lambda _, width, __: Gpt(2, width), text_windows, 16),
}
GROWN = {"MLP of width 32, noisy digits": 1.5}
"""How many times as wide the prior makes a host; eight times by default."""
Arm = Callable[[int, float], dict[str, float]]


def tuned(arm: Arm, seeds: range = SEEDS, others: range = TUNING) -> list[dict[str, float]]:
    """Results of an arm on all seeds, at the rate that is best on validation on others."""
    means = {rate: fmean(arm(seed, rate)["validation"] for seed in others) for rate in RATES}
    rate = max(means, key=means.__getitem__)
    return [arm(seed, rate) | {"rate": rate} for seed in seeds]


def from_scratch(
    host: Host, times: float, policy: str, epochs: int, seed: int, rate: float
) -> dict[str, float]:
    """Train a network with layers ``times`` as wide as those of the host; see ``Host.train``."""
    return host.train(host.build(times, seed), seed, policy, epochs, rate)


def fresh(host: Host, factor: float) -> dict[str, list[dict[str, float]]]:
    """The arms of a host that is trained from the start."""

    arm = partial(from_scratch, host)
    parts = [tuned(partial(arm, times, "never", EPOCHS // len(SWEEP))) for times in SWEEP]
    best = [max(each, key=lambda one: one["validation"]) for each in zip(*parts, strict=True)]
    return {
        "small": tuned(partial(arm, 1, "never", EPOCHS)),
        "grown": tuned(partial(arm, 1, "widen", EPOCHS)),
        "static": tuned(partial(arm, factor, "never", EPOCHS)),
        "sweep": best,
    }


def repeated(host: Host, factor: float) -> dict[str, list[dict[str, float]]]:
    """The grown network and the static one of its size, on more seeds that none was tuned on."""

    grown = partial(from_scratch, host, 1, "widen", EPOCHS)
    static = partial(from_scratch, host, factor, "never", EPOCHS)
    return {
        "grown": tuned(grown, MORE_SEEDS, MORE_TUNING),
        "static": tuned(static, MORE_SEEDS, MORE_TUNING),
    }


def by_gromo(host: Host) -> list[dict[str, float]]:
    """The perceptron grown by gromo to at most the size of the grown one."""

    def arm(seed: int, rate: float) -> dict[str, float]:
        x, y = host.data(seed)
        held_out = slice(TRAIN, TRAIN + VALIDATION), slice(TRAIN + VALIDATION, None)
        widths = host.width, 8 * host.width
        return tiny_growth.train(
            x, y, slice(TRAIN), held_out, widths, host.loss, BATCH, EPOCHS, seed, rate
        )

    return tuned(arm, MORE_SEEDS, MORE_TUNING)


@cache
def trained_model(host: Host, seed: int) -> nn.Module:
    """The small network after ``EPOCHS`` epochs; copy it before training it further."""
    model = host.build(1, seed)
    host.train(model, seed, "never", EPOCHS, 0.01)
    return model


def trained(host: Host, factor: float, epochs: int) -> dict[str, list[dict[str, float]]]:
    """The arms of a host that was trained before, after further epochs."""

    def further(policy: str, seed: int, rate: float) -> dict[str, float]:
        return host.train(deepcopy(trained_model(host, seed)), seed, policy, epochs, rate)

    def shrunk(share: float, seed: int, rate: float) -> dict[str, float]:
        fresh = host.build(1, seed + 1000)
        model = esper.shrink_and_perturb(trained_model(host, seed), fresh, share)
        return host.train(model, seed, "widen", epochs, rate)

    arms: dict[str, Arm] = {
        "longer": partial(further, "never"),
        "grown": partial(further, "widen"),
        **{name: partial(shrunk, share) for name, share in SHARES.items()},
        "scratch": partial(from_scratch, host, factor, "never", epochs),
    }
    return {name: tuned(arm, range(8)) for name, arm in arms.items()}


def deep(name: str) -> dict[str, list[dict[str, float]]]:
    """The arms of a host of two blocks, beside one that has four from the start."""
    make: Callable[[int], nn.Module]
    make, data, stack = DEEP[name]
    host = Host(perceptron, data, 1)

    def arm(depth: int, policy: str, seed: int, rate: float) -> dict[str, float]:
        torch.manual_seed(seed)
        return host.train(make(depth), seed, policy, EPOCHS, rate)

    def stacked(seed: int, rate: float) -> dict[str, float]:
        """As G_stack: the trained blocks twice, after a tenth of the epochs."""
        torch.manual_seed(seed)
        model, begin = make(2), EPOCHS // 10
        host.train(model, seed, "never", begin, rate)
        larger = make(4)
        blocks = list(model.get_submodule(stack).children())
        state = {n: x for n, x in model.state_dict().items() if not n.startswith(f"{stack}.")}
        for i in range(4):
            for key, x in blocks[i % 2].state_dict().items():
                state[f"{stack}.{i}.{key}"] = x
        larger.load_state_dict(state)
        return host.train(larger, seed, "never", EPOCHS - begin, rate)

    arms: dict[str, Arm] = {
        "small": partial(arm, 2, "never"), "deepened": partial(arm, 2, "deepen"),
        "widened": partial(arm, 2, "widen"), "static": partial(arm, 4, "never"), "stacked": stacked,
    }  # fmt: skip
    return {each: tuned(function, range(6)) for each, function in arms.items()}


def _three_times(_: nn.Module, groups: list[Any], __: object) -> dict[Any, int]:
    return {group: 2 * group.channels for group in groups}


def moment(host: Host) -> list[list[Any]]:
    """Test figures by the moment of widening and the start of the squared gradients."""
    rows = []
    for begin in (0.1, 0.25, 0.5):
        row: list[Any] = [begin]
        for share in (1.0, 0.01, 0.0):
            with (
                patch.object(width_search, "BEGIN", begin),
                patch.object(wider_layers, "FRESH", share),
                patch.object(layer_growth, "planned_counts", _three_times),
            ):
                row += [
                    [
                        host.train(host.build(1, seed), seed, "widen", EPOCHS, rate)["test"]
                        for seed in range(8)
                    ]
                    for rate in (0.01, 0.03)
                ]
        rows.append(row)
    return rows


def mean(values: list[float]) -> str:
    """Mean and 95 % interval over seeds."""
    return f"{fmean(values):.1f} ± {Z * stdev(values) / math.sqrt(len(values)):.1f}"


def of(results: list[dict[str, float]]) -> list[float]:
    """The test figures."""
    return [one["test"] for one in results]


def difference(one: list[dict[str, float]], two: list[dict[str, float]]) -> str:
    """Paired difference with its 95 % interval over seeds."""
    values = [a - b for a, b in zip(of(one), of(two), strict=True)]
    error = Z * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):+.1f} [{fmean(values) - error:+.1f}, {fmean(values) + error:+.1f}]"


def fresh_page(work: Path) -> list[str]:
    """The table of hosts that are trained from the start."""
    rows = []
    for name, host in HOSTS.items():
        make = partial(fresh, host, GROWN.get(name, 8))
        arms = kept(work / f"fresh-{name}.json", make)
        ratio = fmean(g["seconds"] for g in arms["grown"]) / fmean(
            s["seconds"] for s in arms["static"]
        )
        sizes = [f"{arms[arm][0]['parameters']:,.0f}" for arm in ("small", "grown")]
        rows.append(
            (
                name, " → ".join(sizes), *(mean(of(arms[arm])) for arm in arms),
                difference(arms["grown"], arms["static"]), difference(arms["grown"], arms["sweep"]),
                f"{ratio:.2f}",
            )
        )  # fmt: skip
    heads = (
        "host", "parameters", "never grown", "grown", "static, the grown size", "best of four",
        "grown − static", "grown − best of four", "time, grown / static",
    )  # fmt: skip
    return [
        f"## From the start\n\n{EPOCHS} epochs, ten seeds. *Static* has from the start the size "
        "that the grown network ends with, which is also the one that the rule would choose "
        "beforehand. *Best of four* trains widths of 1, 2, 4 and 6 times for "
        f"{EPOCHS // len(SWEEP)} epochs each, and keeps the best on validation. ± and brackets: 95 "
        "% over seeds.",
        table(heads, rows),
    ]


def repeated_page(work: Path) -> list[str]:
    """The table of the grown and the static network on more seeds."""
    rows = []
    for name, host in HOSTS.items():
        make = partial(repeated, host, GROWN.get(name, 8))
        arms = kept(work / f"repeated-{name}.json", make)
        rates = [str(arms[arm][0]["rate"]) for arm in ("grown", "static")]
        cells = [mean(of(arms[arm])) for arm in ("grown", "static")]
        rows.append((name, *cells, *rates, difference(arms["grown"], arms["static"])))
    heads = ("host", "grown", "static, the grown size", "rate", "rate", "grown − static")
    return [
        f"## The same with {len(MORE_SEEDS)} seeds\n\nSeeds of which the table above has none, "
        f"with rates tuned on {len(MORE_TUNING)} seeds: on five, the better of two near ones is a "
        "matter of chance.",
        table(heads, rows),
    ]


def gromo_page(work: Path) -> list[str]:
    """The table of the perceptrons beside gromo."""
    rows = []
    for name, host in list(HOSTS.items())[:2]:
        arms = kept(work / f"repeated-{name}.json", partial(repeated, host, 8))
        gromo = kept(work / f"gromo-{name}.json", partial(by_gromo, host))
        sizes = f"{fmean(one['parameters'] for one in gromo):,.0f}"
        cells = mean(of(arms["grown"])), mean(of(gromo)), sizes, str(gromo[0]["rate"])
        rows.append((name, *cells, *(difference(arms[arm], gromo) for arm in ("grown", "static"))))
    heads = (
        "host", "grown", "gromo", "parameters of gromo's", "its rate", "grown − gromo",
        "static − gromo",
    )  # fmt: skip
    return [
        "## Beside gromo\n\nTINY (Verbockhaven and others, 2024) as gromo 0.1 has it: both layers "
        f"grow in {tiny_growth.EVENTS} steps between a tenth and the half of {EPOCHS} epochs to at "
        "most the width of the grown network, with statistics of all training samples and a line "
        "search; seeds and tuning as above.",
        table(heads, rows),
    ]


def trained_page(work: Path) -> list[str]:
    """The table of hosts that were trained before."""
    rows = []
    for name, host in HOSTS.items():
        for epochs in EXTRA:
            make = partial(trained, host, GROWN.get(name, 8), epochs)
            arms = kept(work / f"trained-{name}-{epochs}.json", make)
            cells = (mean(of(arms[arm])) for arm in ("longer", "grown", *SHARES, "scratch"))
            others = (difference(arms[arm], arms["scratch"]) for arm in ("grown", *SHARES))
            rows.append((name, epochs, *cells, *others))
    shares = [f"shrunk to {share} and grown" for share in SHARES.values()]
    heads = (
        "host", "further epochs", "trained longer", "grown in place", *shares,
        "larger, from scratch", "grown − from scratch", *(f"{s} − from scratch" for s in shares),
    )  # fmt: skip
    return [
        "## A network that is trained already\n\nTrained for 40 epochs, then found too small: "
        "eight seeds, after further epochs. *Shrunk to 0.6* keeps 0.6 of each weight and adds 0.4 "
        "of a fresh one before it grows (Ash and Adams, 2020).",
        table(heads, rows),
    ]


def deep_page(work: Path) -> list[str]:
    """The table of stacks of blocks."""
    rows = []
    for name in DEEP:
        arms = kept(work / f"deep-{name}.json", partial(deep, name))
        sizes = [f"{arms[arm][0]['parameters']:,.0f}" for arm in ("small", "deepened", "widened")]
        others = ("small", "static", "stacked")
        differences = [difference(arms["deepened"], arms[other]) for other in others]
        rows.append((name, ", ".join(sizes), *(mean(of(arms[arm])) for arm in arms), *differences))
    heads = (
        "host of two blocks", "parameters: small, deepened, widened", "never grown", "deepened",
        "widened", "four from the start", "stacked", "deepened − never grown",
        "deepened − four from the start", "deepened − stacked",
    )  # fmt: skip
    return [
        f"## Deeper\n\n{EPOCHS} epochs, six seeds. *Stacked* repeats the trained blocks after a "
        "tenth of the epochs and trains the rest with a new optimizer, as G_stack (Du and others, "
        "2024). Of the GPT the figure is the accuracy of the next byte.",
        table(heads, rows),
    ]


def moment_page(work: Path) -> list[str]:
    """The table of moments and of the optimizer's state."""
    host = HOSTS["MLP of width 4, noisy digits"]
    rows = [
        (f"{begin:.0%}", *(mean(values) for values in cells))
        for begin, *cells in kept(work / "moment.json", partial(moment, host))
    ]
    heads = ["widened after"]
    heads += [f"{share:.0%}, rate {rate}" for share in (1.0, 0.01, 0.0) for rate in (0.01, 0.03)]
    return [
        "## When, and with which state of the optimizer\n\nThe MLP on noisy digits, three times as "
        "wide, eight seeds. Adam's mean of squared gradients of a new entry starts at a share of "
        "the mean over the others (`wider_layers.FRESH` is 1 %): at the whole mean, new entries "
        "learn so slowly that a late widening comes to nothing.",
        table(heads, rows),
    ]


DEEP: dict[str, Any] = {
    "residual CNN, noisy digits": (residual, noisy_digits, "4"),
    "GPT of width 32, bytes": (Gpt, text_windows, "blocks"),
}
PARTS = {
    "fresh": fresh_page,
    "repeated": repeated_page,
    "gromo": gromo_page,
    "trained": trained_page,
    "deep": deep_page,
    "moment": moment_page,
}


def main() -> None:
    """Run the parts and print the page."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/widening"))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    paragraphs = [text for name in arguments.parts for text in PARTS[name](arguments.work)]
    parts = ("Test accuracy or R² in percent.", *paragraphs, f"{made_on()}.")
    publish("widening", "Widening in mid-training", parts, arguments.write)


if __name__ == "__main__":
    main()
