"""Hosts on data sets, and of an architecture, that no rule was learned on; see ``home``.

What learns a rule does not import this file.
"""

from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from esper.runtime.text import SHIPPED_TEXT
from esper_lab.capacity.hosts import (
    TEST,
    VALIDATION,
    Host,
    Split,
    convolutions,
    drawn_circumstances,
    perceptron,
    residual,
    wrong_labels,
)
from esper_lab.data import mnist1d
from esper_lab.families import log_uniform

ROWS = 8
"""Steps in which a recurrent network reads a sample."""


class Reader(nn.Module):
    """An LSTM that reads a sample in ``ROWS`` steps."""

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.lstm = nn.LSTM(inputs // ROWS, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to ``[B, outputs]``."""
        return self.head(self.lstm(x.unflatten(1, (ROWS, -1)))[1][0][0])


def reader(inputs: int, width: int, _: int, outputs: int) -> nn.Module:
    """A recurrent network; the depth is not used."""
    return Reader(inputs, width, outputs)


def signals(samples: int, seed: int) -> Split:
    """MNIST-1D (Greydanus, 2020), with drawn wrong labels."""
    draws = np.random.default_rng(seed)
    data = mnist1d()
    x = torch.cat([data.train_images, data.validation_images, data.test_images]).flatten(1)
    y = torch.cat([data.train_labels, data.validation_labels, data.test_labels])
    rows = torch.from_numpy(draws.permutation(len(x))[: samples + VALIDATION + TEST])
    y = wrong_labels(y[rows], draws.choice([0.0, 0.0, 0.1, 0.3]), samples, draws)
    return Split(x[rows], y)


@cache
def _stream() -> bytes:
    return SHIPPED_TEXT.read_bytes().lower()


def bytes_of_text(samples: int, seed: int) -> Split:
    """The next letter (27: none) of the text, from the bits of the eight bytes before it."""
    draws = np.random.default_rng(seed)
    stream = np.frombuffer(_stream(), dtype=np.uint8)
    ends = draws.choice(len(stream) - ROWS, samples + VALIDATION + TEST, replace=False) + ROWS
    windows = np.stack([stream[ends - ROWS + i] for i in range(ROWS)], 1)
    bits = np.unpackbits(windows, axis=1).astype(np.float32) * 2 - 1
    letters = stream[ends].astype(np.int64) - ord("a")
    letters[(letters < 0) | (letters > 25)] = 26
    return Split(torch.from_numpy(bits), torch.from_numpy(letters))


def shapes(samples: int, seed: int) -> Split:
    """Drawings of eight kinds at drawn places, with drawn noise and wrong labels."""
    draws = np.random.default_rng(seed)
    count = samples + VALIDATION + TEST
    kinds = draws.integers(8, size=count)
    images = np.zeros((count, 8, 8), dtype=np.float32)
    masks = _masks()
    for image, kind in zip(images, kinds, strict=True):
        row, column = draws.integers(4, size=2)
        image[row : row + 5, column : column + 5] = masks[kind][: 8 - row, : 8 - column]
    images += draws.uniform(0.1, 0.6) * draws.standard_normal(images.shape)
    y = wrong_labels(torch.from_numpy(kinds), draws.choice([0.0, 0.0, 0.1, 0.3]), samples, draws)
    return Split(torch.from_numpy(images).float().flatten(1), y)


PICTURES = (
    ".....  .....  #####  .....  .....",
    "..#..  ..#..  ..#..  ..#..  ..#..",
    "#....  .#...  ..#..  ...#.  ....#",
    "....#  ...#.  ..#..  .#...  #....",
    "..#..  ..#..  #####  ..#..  ..#..",
    "#####  #...#  #...#  #...#  #####",
    ".....  .###.  .###.  .###.  .....",
    "#####  #....  #....  #....  #....",
)


def _masks() -> np.ndarray:
    """Eight drawings of 5 x 5 pixels."""
    marks = [[[float(mark == "#") for mark in row] for row in each.split()] for each in PICTURES]
    return np.array(marks, dtype=np.float32)


def draw(number: int) -> Host:
    """Host ``number``; an even one is trained from scratch, an odd one arrives trained."""
    draws = np.random.default_rng([42, number])
    data = (signals, bytes_of_text, shapes)[number // 2 % 3]
    kinds = (perceptron, convolutions, residual) if data is shapes else (perceptron, reader)
    architecture = kinds[number // 6 % len(kinds)]
    samples = round(log_uniform(draws, 100, 1500) / 50) * 50
    is_image = architecture in (convolutions, residual)
    more = drawn_circumstances(draws, is_image, number % 2 == 1)
    drawn_data, seed = partial(data, samples, number), 100_000 + number
    return Host(architecture, drawn_data, data.__name__, samples, seed=seed, **more)
