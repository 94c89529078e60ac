"""Data of the families: shifts of the digits, and MNIST-1D."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.errors import UsageError
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
    return replace(data, train_images=data.train_images[rows], train_labels=data.train_labels[rows])


def shifted_digits(shifts: tuple[Shift, ...], labels: int, sample: int, seed: int = 0) -> Dataset:
    """``few_digits`` after the shifts, in their order."""
    data = few_digits(labels, sample, seed)
    for shift in shifts:
        data = shift.apply(data)
    return data


CLASSES, LENGTH = 10, 40
TRAINING, VALIDATION = 3_500, 500


@cache
def mnist1d(
    correlated_noise: float = 0.25,
    shear: float = 0.75,
    translation: int = 48,
    labels: int = TRAINING,
    shuffled: bool = False,
    seed: int = 0,
) -> Dataset:
    """5,000 sequences as images ``[n, 40, 1, 1]``; the defaults are those of the paper.

    The test split is that of the package. The validation split is drawn from the rest with
    ``seed``, and the training split keeps the first ``labels`` of what remains.

    Args:
        correlated_noise: standard deviation of the smooth noise beside the pattern.
        shear: greatest slope added to a sequence.
        translation: greatest shift of the pattern, in samples of 72 per sequence.
        labels: number of training sequences.
        shuffled: whether the samples of every sequence are permuted, always in the same way.
        seed: seed of the split.

    Raises:
        UsageError: the package mnist1d is not installed.
        ValueError: ``labels`` is out of range.
    """
    if not 1 <= labels <= TRAINING:
        raise ValueError(f"labels must lie in [1, {TRAINING}], got {labels}")
    splits = _generate(correlated_noise, shear, translation, shuffled)
    (images, test_images), (targets, test_targets) = splits
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(images)))
    validation, train = order[:VALIDATION], order[VALIDATION : VALIDATION + labels]
    return Dataset(
        images[train], targets[train], images[validation], targets[validation], test_images,
        test_targets, classes=CLASSES,
    )  # fmt: skip


Pair = tuple[Tensor, Tensor]


@cache
def _generate(noise: float, shear: float, translation: int, shuffle: bool) -> tuple[Pair, Pair]:
    """Inputs and labels, each of the training and the test part of the package."""
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError as error:
        raise UsageError(
            "data: MNIST-1D needs the package mnist1d; run pip install 'esper-growth[mnist1d]'"
        ) from error
    settings = get_dataset_args()
    settings.corr_noise_scale, settings.shear_scale = noise, shear
    settings.max_translation, settings.shuffle_seq = translation, shuffle
    # The package seeds the global generators, which belong to the user.
    states = random.getstate(), np.random.get_state()
    try:
        data = make_dataset(settings)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])

    def part(name: str, kind: type) -> Tensor:
        return torch.from_numpy(data[name].astype(kind))

    images = [part(name, np.float32).view(-1, LENGTH, 1, 1) for name in ("x", "x_test")]
    return (images[0], images[1]), (part("y", np.int64), part("y_test", np.int64))


@cache
def mislabelled(
    data: Callable[..., Dataset],
    share: float,
    seed: int = 0,
    only: tuple[int, ...] | None = None,
    **settings: Any,
) -> Dataset:
    """``data(seed=seed, **settings)`` with wrong training labels, and with some classes only.

    ``share`` of the training labels are replaced by labels drawn uniformly, always the same ones.
    All splits keep only the classes ``only`` (None: all), from which the wrong labels are drawn
    too; the labels stay the same and so does ``Dataset.classes``.

    Raises:
        ValueError: ``share`` is not in [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must lie in [0, 1], got {share}")
    dataset = data(seed=seed, **settings)
    if only is not None:
        dataset = _of_classes(dataset, only)
    draws = np.random.default_rng(seed)
    wrong = torch.from_numpy(draws.random(dataset.train_labels.shape) < share)
    labels = torch.tensor(range(dataset.classes) if only is None else only)
    wrong_labels = labels[draws.integers(len(labels), size=tuple(dataset.train_labels.shape))]
    return replace(dataset, train_labels=torch.where(wrong, wrong_labels, dataset.train_labels))


def _of_classes(data: Dataset, only: tuple[int, ...]) -> Dataset:
    """``data`` with the rows of some classes only."""
    parts: dict[str, Any] = {}
    for name in ("train", "validation", "test"):
        images, labels = getattr(data, f"{name}_images"), getattr(data, f"{name}_labels")
        rows = torch.isin(labels, torch.tensor(only))
        parts |= {f"{name}_images": images[rows], f"{name}_labels": labels[rows]}
    return replace(data, **parts)
