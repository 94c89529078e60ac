"""Data sets that reside in memory, split into train, validation and test."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.runtime.paths import absolute_path


@dataclass(frozen=True)
class Dataset:
    """Float images ``[n, H, W, C]`` and labels ``[n, *label_shape]`` of three disjoint splits.

    Training uses ``train_*``, rewards and observations use the fixed set ``validation_*``, and only
    evaluation uses ``test_*``.

    Raises:
        UsageError: a split is empty, does not have one label per image, or has a label out of
            range.
    """

    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    label_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for split in ("train", "validation", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            if not len(images) or labels.shape != (len(images), *self.label_shape):
                raise UsageError(
                    f"data: the {split} split has images {list(images.shape)} and labels "
                    f"{list(labels.shape)}; give one label per image, and at least one image"
                )
            lowest, highest = labels.min().item(), labels.max().item()
            if not 0 <= lowest <= highest < self.classes:
                raise UsageError(
                    f"data: labels of the {split} split lie in [{lowest}, {highest}]; "
                    f"number the {self.classes} classes from 0"
                )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all images, as float32, and all labels, in hexadecimal."""
        hasher = hashlib.sha256(repr((self.classes, self.label_shape)).encode())
        for split in ("train", "validation", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            for tensor in (map_elements(images, lambda x: x.to(torch.float32)), labels):
                windows = stored_elements(tensor) < tensor.numel()
                hasher.update(f"{list(tensor.shape)} {tensor.stride() if windows else ''}".encode())
                # Overlapping windows are hashed as the one stream that they are in memory.
                stream = tensor.as_strided((_span(tensor),), (1,)) if windows else tensor
                hasher.update(stream.detach().cpu().contiguous().numpy().data)
        return hasher.hexdigest()


def stored_elements(x: Tensor) -> int:
    """Number of elements of ``x`` in memory; fewer than ``x.numel()`` if its windows overlap."""
    return min(x.numel(), _span(x))


def map_elements(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function(x)`` for an elementwise function; overlapping windows of ``x`` still overlap."""
    if stored_elements(x) == x.numel():
        return function(x)
    return function(x.as_strided((_span(x),), (1,))).as_strided(x.shape, x.stride(), 0)


def _span(x: Tensor) -> int:
    """Number of elements from the first to the last in memory."""
    return 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


@dataclass(frozen=True)
class FromDirectory:
    """Reads the data of a task from files, for use as ``Task.data``.

    Attributes:
        read: reads the data of a directory; its UsageError names what is missing.
        directory: the directory with the files.
    """

    read: Callable[[Path], Dataset]
    directory: Path = Path("data")

    def __call__(self) -> Dataset:
        try:
            path = absolute_path(self.directory)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"data_dir: {str(self.directory)!r} is not a path ({error})"
            ) from error
        return self.read(Path(path))


@dataclass(frozen=True)
class DrawnSplit:
    """Makes data whose split is drawn with a seed, for use as ``Task.data``.

    Attributes:
        make: makes the data set; takes the keyword argument ``seed`` that determines which
            images are for training, validation and test.
        seed: seed of the split.
    """

    make: Callable[..., Dataset]
    seed: int = 0

    def __call__(self) -> Dataset:
        return self.make(seed=self.seed)


@cache
def digits(
    shift: int = 0,
    noise: float = 0.0,
    seed: int = 0,
    label_fraction: float = 1.0,
    classes: int = 10,
    rotation: int = 0,
) -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, which come with the library.

    Images are shifted by up to ``shift`` pixels in each direction, rotated by up to ``rotation``
    quarter turns, and have Gaussian noise of standard deviation ``noise`` added (pixels lie in
    [0, 1]). The training set holds each image at every shift and rotation; validation and test hold
    each image once, at a shift and rotation drawn with ``seed``.

    The split is 1,197 / 300 / 300 images and depends only on ``seed``: no image appears in two
    splits at any shift or rotation, whatever the other arguments. All splits keep only the digits
    below ``classes``; ``label_fraction`` keeps that fraction of the training images of each
    class (at least one). The images that remain are bitwise the same as without these arguments.

    Raises:
        ValueError: an argument is out of range.
    """
    from sklearn.datasets import load_digits

    if not (0 <= shift < 8 and noise >= 0.0 and rotation in range(4)):
        raise ValueError(
            "shift must lie in [0, 7], noise must be 0 or more and rotation in [0, 3], "
            f"got {shift}, {noise} and {rotation}"
        )
    if not (0.0 < label_fraction <= 1.0 and 2 <= classes <= 10):
        raise ValueError(
            "label_fraction must lie in (0, 1] and classes in [2, 10], "
            f"got {label_fraction} and {classes}"
        )
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16.0
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(images))
    train, validation, test = np.split(order, [1197, 1497])
    reach = range(-shift, shift + 1)
    poses = list(product(range(rotation + 1), reach, reach))

    def pose_of(pixels: np.ndarray, pose: tuple[int, int, int]) -> np.ndarray:
        turns, down, right = pose
        return _shift(np.rot90(pixels, turns, axes=(-2, -1)), down, right)

    def noisy(pixels: np.ndarray) -> Tensor:
        pixels = pixels + noise * generator.standard_normal(pixels.shape)
        return torch.from_numpy(pixels.astype(np.float32))[..., None]

    def posed_once(index: np.ndarray) -> Tensor:
        numbers = generator.integers(len(poses), size=len(index))
        return noisy(
            np.stack([pose_of(images[i], poses[d]) for i, d in zip(index, numbers, strict=True)])
        )

    # Draw noise also for images that are left out below, so that the others always get the same.
    all_posed = noisy(np.concatenate([pose_of(images[train], pose) for pose in poses]))
    validation_images, test_images = posed_once(validation), posed_once(test)
    rows = (labels[train] < classes) & _part_of_each_class(labels[train], label_fraction)
    kept_rows = np.tile(rows, len(poses))
    kept_validation, kept_test = labels[validation] < classes, labels[test] < classes
    return Dataset(
        train_images=all_posed[kept_rows],
        train_labels=torch.from_numpy(np.tile(labels[train], len(poses))[kept_rows]).long(),
        validation_images=validation_images[kept_validation],
        validation_labels=torch.from_numpy(labels[validation][kept_validation]).long(),
        test_images=test_images[kept_test],
        test_labels=torch.from_numpy(labels[test][kept_test]).long(),
        classes=classes,
    )


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


def _part_of_each_class(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Whether each of ``labels [n]`` is in the first ``fraction`` of its class, bool ``[n]``."""
    part = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        part[members[: max(1, round(fraction * len(members)))]] = True
    return part


def _shift(images: np.ndarray, down: int, right: int) -> np.ndarray:
    """Images ``[..., H, W]`` shifted by whole pixels and filled with 0."""
    height, width = images.shape[-2:]
    reach = max(abs(down), abs(right))
    padding = [(0, 0)] * (images.ndim - 2) + [(reach, reach)] * 2
    padded = np.pad(images, padding)
    row, column = reach - down, reach - right
    return padded[..., row : row + height, column : column + width]
