"""Shifts of the digits: changes of the images or labels that a trained network may meet.

The kinds overlap in how far they lower the accuracy, so accuracy alone does not tell them apart.
Which block of a network has to change depends on the kind (Lee et al., "Surgical fine-tuning
improves adaptation to distribution shifts", ICLR 2023): early blocks for the images, late ones for
the labels.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.runtime.data import Dataset, digits

IMAGE_KINDS = ("noise", "contrast", "rotation", "translation", "occlusion")
LABEL_KINDS = ("permuted", "swapped")
KINDS = IMAGE_KINDS + LABEL_KINDS
CLASSES = 10


@dataclass(frozen=True)
class Shift:
    """A change of the images or labels of the digits.

    | kind | from strength 0 to strength 1 |
    |---|---|
    | noise | Gaussian noise of standard deviation 0.2 to 0.8 |
    | contrast | pixels multiplied by 0.36 to -0.6, brightened by 0.32 to 0.8 |
    | rotation | 20 to 90 degrees, to one side |
    | translation | 1 to 2 pixels, in one direction |
    | occlusion | a black square of 2 to 4 pixels, at one place |
    | permuted | the labels of 3 to 10 classes move on cyclically |
    | swapped | the labels of 1 to 3 pairs of classes are exchanged |

    Attributes:
        kind: one of ``KINDS``.
        strength: in [0, 1].
        seed: determines side, direction, place, classes and noise.

    Raises:
        ValueError: the kind is unknown or the strength is out of range.
    """

    kind: str
    strength: float
    seed: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0.0 <= self.strength <= 1.0:
            raise ValueError(f"strength must lie in [0, 1], got {self.strength}")

    def apply(self, data: Dataset) -> Dataset:
        """The data with all splits shifted in the same way; noise is drawn for each image."""
        generator = np.random.default_rng(self.seed)
        change = generator.integers(1 << 32)
        splits: dict[str, Any] = {}
        for name in ("train", "validation", "test"):
            images, labels = getattr(data, f"{name}_images"), getattr(data, f"{name}_labels")
            noise = generator.standard_normal(images.shape)
            draws = np.random.default_rng(change)
            if self.kind in LABEL_KINDS:
                labels = torch.from_numpy(self._classes(draws))[labels]
            else:
                images = self._images(images, noise, draws)
            splits |= {f"{name}_images": images, f"{name}_labels": labels}
        return replace(data, **splits)

    def _images(self, images: Tensor, noise: np.ndarray, draws: np.random.Generator) -> Tensor:
        """Images ``[n, H, W, 1]`` after the shift."""
        strength = self.strength
        match self.kind:
            case "noise":
                return images + (0.2 + 0.6 * strength) * torch.from_numpy(noise).float()
            case "contrast":
                level = 0.4 + 0.6 * strength
                return (1.0 - 1.6 * level) * images + 0.8 * level
            case "rotation":
                return rotate(images, draws.choice([-1.0, 1.0]) * (20.0 + 70.0 * strength))
            case "translation":
                pixels = 1 + round(strength)
                down, right = ((1, 0), (-1, 0), (0, 1), (0, -1))[draws.integers(4)]
                return translate(images, down * pixels, right * pixels)
            case _:
                side = 2 + round(2.0 * strength)
                row, column = draws.integers(images.shape[1] - side + 1, size=2)
                images = images.clone()
                images[:, row : row + side, column : column + side] = 0.0
                return images

    def _classes(self, draws: np.random.Generator) -> np.ndarray:
        """The new label of each class, int64 ``[CLASSES]``."""
        labels = np.arange(CLASSES)
        if self.kind == "permuted":
            classes = draws.choice(CLASSES, 3 + round(7.0 * self.strength), replace=False)
            labels[classes] = np.roll(classes, 1)
        else:
            pairs = draws.choice(CLASSES, (1 + round(2.0 * self.strength), 2), replace=False)
            labels[pairs] = pairs[:, ::-1]
        return labels


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images ``[n, H, W, C]`` turned counter-clockwise, interpolated bilinearly, filled with 0."""
    angle = math.radians(degrees)
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    )
    channels_first = images.permute(0, 3, 1, 2)
    grid = F.affine_grid(
        turn.expand(len(images), 2, 3), list(channels_first.shape), align_corners=False
    )
    return F.grid_sample(channels_first, grid, align_corners=False).permute(0, 2, 3, 1).contiguous()


def translate(images: Tensor, down: int, right: int) -> Tensor:
    """Images ``[n, H, W, C]`` moved by whole pixels and filled with 0."""
    result = torch.zeros_like(images)
    height, width = images.shape[1:3]
    result[:, max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = images[
        :, max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
    ]
    return result


@cache
def few_digits(labels: int, sample: int, seed: int = 0) -> Dataset:
    """The digits with ``labels`` training images, drawn with the seed ``sample``.

    Validation and test are those of ``digits``, whose ``seed`` determines the split.

    Raises:
        ValueError: there are not that many training images.
    """
    data = digits(seed=seed)
    count = len(data.train_labels)
    if not 1 <= labels <= count:
        raise ValueError(f"labels must lie in [1, {count}], got {labels}")
    rows = torch.from_numpy(np.random.default_rng(sample).permutation(count)[:labels])
    return Dataset(
        data.train_images[rows],
        data.train_labels[rows],
        data.validation_images,
        data.validation_labels,
        data.test_images,
        data.test_labels,
        classes=data.classes,
    )


def shifted_digits(shifts: tuple[Shift, ...], labels: int, sample: int, seed: int = 0) -> Dataset:
    """``few_digits`` after the shifts, in their order."""
    data = few_digits(labels, sample, seed)
    for shift in shifts:
        data = shift.apply(data)
    return data
