"""Converts existing data (arrays, torch data sets and data loaders) to a ``Dataset``."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from esper.leyline.errors import UsageError, first_line
from esper.runtime.data import Dataset

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
