"""Hosts on data sets, and of an architecture, that no rule was learned on; see ``capacity.py``.

What learns a rule does not import this file.
"""

from functools import cache, partial

import numpy as np
import torch
from capacity_hosts import (
    TEST,
    VALIDATION,
    Host,
    Split,
    convolutions,
    log_uniform,
    perceptron,
    residual,
    wrong_labels,
)
from torch import Tensor, nn

from esper.runtime.text import SHIPPED_TEXT
from esper_lab.data import mnist1d

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


def reader(inputs: int, width: int, depth: int, outputs: int) -> nn.Module:
    """A recurrent network; ``depth`` is not used."""
    del depth
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
        top, left = draws.integers(4, size=2)
        image[top : top + 5, left : left + 5] = masks[kind][: 8 - top, : 8 - left]
    images += draws.uniform(0.1, 0.6) * draws.standard_normal(images.shape)
    y = wrong_labels(torch.from_numpy(kinds), draws.choice([0.0, 0.0, 0.1, 0.3]), samples, draws)
    return Split(torch.from_numpy(images).float().flatten(1), y)


def _masks() -> np.ndarray:
    """Eight drawings of 5 x 5 pixels."""
    line, corner = np.arange(5), np.zeros((5, 5))
    masks = np.zeros((8, 5, 5), dtype=np.float32)
    masks[0, 2, :] = masks[1, :, 2] = 1.0
    masks[2, line, line] = masks[3, line, 4 - line] = 1.0
    masks[4, 2, :] = masks[4, :, 2] = 1.0
    masks[5] = 1.0
    masks[5, 1:4, 1:4] = 0.0
    masks[6, 1:4, 1:4] = 1.0
    corner[0, :] = corner[:, 0] = 1.0
    masks[7] = corner
    return masks


def drawn(number: int) -> Host:
    """Host ``number``; an even one is trained from scratch, an odd one arrives trained."""
    draws = np.random.default_rng([42, number])
    data = (signals, bytes_of_text, shapes)[number // 2 % 3]
    kinds = (perceptron, convolutions, residual) if data is shapes else (perceptron, reader)
    architecture = kinds[number // 6 % len(kinds)]
    image = architecture in (convolutions, residual)
    trained = number % 2 == 1
    samples = round(log_uniform(draws, 100, 1500) / 50) * 50
    return Host(
        architecture, partial(data, samples, number), data.__name__, samples,
        width=round(log_uniform(draws, 2, 10 if image else 32)),
        depth=int(draws.integers(1, 4)),
        epochs=round(log_uniform(draws, 3, 20) if trained else log_uniform(draws, 15, 60)),
        price=log_uniform(draws, 0.003, 0.1), trained=trained, seed=100_000 + number,
    )  # fmt: skip
