"""Data sets that live on the device, split once into train, validation and test."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Images ``[n, H, W, C]`` in float and labels ``[n]`` of three disjoint splits.

    Training draws from ``train_*``; reward and observation see ``validation_*``, a fixed set;
    ``test_*`` is touched by evaluation alone.
    """

    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int

    def to(self, dtype: torch.dtype, device: torch.device) -> "Dataset":
        return Dataset(
            self.train_images.to(device, dtype),
            self.train_labels.to(device),
            self.validation_images.to(device, dtype),
            self.validation_labels.to(device),
            self.test_images.to(device, dtype),
            self.test_labels.to(device),
            self.classes,
        )


@cache
def digits(shift: int = 0, noise: float = 0.0, seed: int = 0) -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, which come with the library.

    Every image may be shifted by up to ``shift`` pixels in each direction and carries Gaussian
    noise of standard deviation ``noise`` (pixels lie in [0, 1]). The training set holds each image
    at every shift; validation and test hold each image once, at a shift drawn from ``seed``.

    The split is 1,197 / 300 / 300 images; no image appears in two splits at any shift.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16.0
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(images))
    train, validation, test = np.split(order, [1197, 1497])
    offsets = [(y, x) for y in range(-shift, shift + 1) for x in range(-shift, shift + 1)]

    def noisy(pixels: np.ndarray) -> Tensor:
        pixels = pixels + noise * generator.standard_normal(pixels.shape)
        return torch.from_numpy(pixels.astype(np.float32))[..., None]

    def moved_once(index: np.ndarray) -> Tensor:
        drawn = generator.integers(len(offsets), size=len(index))
        return noisy(
            np.stack([_moved(images[i], *offsets[d]) for i, d in zip(index, drawn, strict=True)])
        )

    everywhere = np.concatenate([_moved(images[train], y, x) for y, x in offsets])
    return Dataset(
        train_images=noisy(everywhere),
        train_labels=torch.from_numpy(np.tile(labels[train], len(offsets))).long(),
        validation_images=moved_once(validation),
        validation_labels=torch.from_numpy(labels[validation]).long(),
        test_images=moved_once(test),
        test_labels=torch.from_numpy(labels[test]).long(),
        classes=10,
    )


def _moved(images: np.ndarray, down: int, right: int) -> np.ndarray:
    """Images ``[..., H, W]`` moved by whole pixels, with 0 where nothing was."""
    height, width = images.shape[-2:]
    reach = max(abs(down), abs(right))
    padding = [(0, 0)] * (images.ndim - 2) + [(reach, reach)] * 2
    padded = np.pad(images, padding)
    top, left = reach - down, reach - right
    return padded[..., top : top + height, left : left + width]
