"""Arrays, torch data sets and loaders are converted to a ``Dataset``."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from esper.leyline.errors import UsageError
from esper.runtime.data import read_dataset

IMAGES = torch.arange(5 * 2 * 3 * 4).view(5, 2, 3, 4)
LABELS = torch.tensor([0, 1, 2, 1, 0])
PAIRS = TensorDataset(IMAGES, LABELS)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(PAIRS)


@pytest.mark.parametrize(
    "source",
    [
        (IMAGES, LABELS),
        (IMAGES.numpy(), LABELS.tolist()),
        PAIRS,
        Stream(),
        DataLoader(PAIRS, batch_size=2),
    ],
    ids=["tensors", "arrays", "data set", "stream", "loader"],
)
def test_all_kinds_of_sources_give_the_same_data(source) -> None:
    data = read_dataset(source, PAIRS, PAIRS, classes=3)
    assert data.train_images.dtype == torch.float32
    assert data.train_images.shape == (5, 3, 4, 2)
    for image in range(5):
        assert torch.equal(data.train_images[image].permute(2, 0, 1), IMAGES[image].float())
    assert torch.equal(data.train_labels, LABELS)


def test_vectors_become_images_of_one_pixel() -> None:
    data = read_dataset(*[(np.ones((4, 7)), np.zeros(4, dtype=int))] * 3, classes=1)
    assert data.test_images.shape == (4, 1, 1, 7)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ((IMAGES[:, 0], LABELS), r"images of the test split are \[5, 3, 4\]"),
        ((IMAGES, LABELS.float()), "labels of the test split are torch.float32"),
        ((IMAGES, LABELS[:3]), "give one label per image"),
        ([("no", 1)], "the test split cannot be read"),
        (7, "the test split cannot be read"),
    ],
)
def test_unreadable_data_error_names_the_split(source, says: str) -> None:
    with pytest.raises(UsageError, match=says) as fault:
        read_dataset(PAIRS, PAIRS, source, classes=3)
    assert "\n" not in str(fault.value)
