"""Data sets in memory, split into train, validation and test, and augmentation of images."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from esper.leyline.errors import UsageError, first_line
from esper.runtime.paths import absolute_path


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Pads each image with ``reach`` pixels of 0 on every side and crops it to its original size.

    A pose is one number that encodes the position of the crop and whether it is mirrored:
    ``(flipped * span + down) * span + right`` with ``span = 2 reach + 1``.

    Attributes:
        reach: largest shift in each direction, in pixels.
        flip: whether to mirror images left to right, with probability 0.5.
    """

    reach: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.reach <= 1024:
            raise ValueError(f"reach must lie in [0, 1024], got {self.reach}")

    @property
    def span(self) -> int:
        """Number of positions of a crop along one axis."""
        return 2 * self.reach + 1

    @property
    def poses(self) -> int:
        """Number of poses, which are equally likely."""
        return self.span**2 * (2 if self.flip else 1)

    # Native twin: hosts/worker.h, pose.
    def apply(self, images: Tensor, poses: Tensor) -> Tensor:
        """Crop and flip ``images [n, H, W, C]`` to ``poses``, int64 ``[n]`` on the same device."""
        count, height, width, _ = images.shape
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device).expand(count, -1)
        mirror = (poses // self.span**2)[:, None] > 0
        y = rows + (poses // self.span % self.span - self.reach)[:, None]
        x = torch.where(mirror, width - 1 - columns, columns)
        x = x + (poses % self.span - self.reach)[:, None]
        inside = _inside(y, height)[:, :, None] & _inside(x, width)[:, None, :]
        image = torch.arange(count, device=images.device)[:, None, None]
        crop = images[image, y.clamp(0, height - 1)[:, :, None], x.clamp(0, width - 1)[:, None, :]]
        return torch.where(inside[..., None], crop, 0.0)


def _inside(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)


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


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``[1797, 64]`` and labels of scikit-learn's digits.

    Importing its data sets takes most of a second, reading their file does not.
    """
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            rows = np.loadtxt(file, delimiter=",")
            return rows[:, :-1], rows[:, -1].astype(int)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


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
    images, labels = _digits()
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


Source = tuple[Any, Any] | TorchDataset[Any] | DataLoader[Any]
"""A pair of images and labels, a data set of such pairs, or a loader of batches."""

_BATCH = 256
"""Images per batch when reading a torch data set."""


def read_dataset(train: Source, validation: Source, test: Source, classes: int) -> Dataset:
    """Make a ``Dataset`` from arrays, torch data sets or data loaders.

    Args:
        train, validation, test: each a pair (images, labels) of arrays or tensors, a torch
            ``Dataset`` of such pairs, or a ``DataLoader`` over one, which is read once. An image is
            ``[C, H, W]`` as in torch, or a vector ``[F]``, which becomes one pixel.
        classes: number of classes, numbered from 0.

    Raises:
        UsageError: a split cannot be read or has wrong shapes or types; see also ``Dataset``.
    """
    return Dataset(
        *_split("train", train), *_split("validation", validation), *_split("test", test), classes
    )


def _split(name: str, source: Source) -> tuple[Tensor, Tensor]:
    try:
        pairs = [source] if isinstance(source, tuple) else list(_batches(source))
        images = torch.cat([_tensor(batch[0]).float() for batch in pairs])
        labels = torch.cat([_tensor(batch[1]) for batch in pairs])
    except Exception as error:
        reason = first_line(error)
        raise UsageError(
            f"data: the {name} split cannot be read ({reason}); give pairs of an image tensor and "
            "a label"
        ) from error
    if labels.is_floating_point() or labels.ndim != 1:
        raise UsageError(
            f"data: labels of the {name} split are {labels.dtype} {list(labels.shape)}; "
            "give one whole number per image"
        )
    if images.ndim == 2:
        return images[:, None, None], labels.long()
    if images.ndim != 4:
        raise UsageError(
            f"data: images of the {name} split are {list(images.shape)}; give [n, C, H, W] or "
            "[n, F]"
        )
    return images.permute(0, 2, 3, 1).contiguous(), labels.long()


def _batches(source: TorchDataset[Any] | DataLoader[Any]) -> Iterable[Any]:
    """Batches of images and labels; a data set is read in order."""
    return source if isinstance(source, DataLoader) else DataLoader(source, batch_size=_BATCH)


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
