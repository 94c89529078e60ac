"""MNIST-1D: its splits, its settings, and the user's generators."""

import random
import sys

import numpy as np
import pytest
import torch

from esper.leyline.errors import UsageError
from esper_lab import data as module
from esper_lab.data import mnist1d

pytest.importorskip("mnist1d", reason="the package mnist1d is not installed")


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_the_splits_are_disjoint_and_the_test_split_is_that_of_the_package():
    from mnist1d.data import get_dataset_args, make_dataset

    expected = make_dataset(get_dataset_args())
    data = mnist1d()
    sizes = [len(getattr(data, f"{split}_labels")) for split in ("train", "validation", "test")]
    assert sizes == [3500, 500, 1000]
    np.testing.assert_array_equal(data.test_images[:, :, 0, 0], expected["x_test"].astype("f4"))
    np.testing.assert_array_equal(data.test_labels, expected["y_test"])
    parts = [rows(getattr(data, f"{split}_images")) for split in ("train", "validation", "test")]
    assert len(set.union(*parts)) == sum(sizes)
    other = mnist1d(seed=1)
    assert rows(other.train_images) != parts[0]
    assert rows(other.test_images) == parts[2]


def test_fewer_labels_are_the_first_of_more():
    few, more = mnist1d(labels=300), mnist1d(labels=1000)
    assert torch.equal(few.train_images, more.train_images[:300])
    assert torch.equal(few.validation_images, more.validation_images)
    with pytest.raises(ValueError, match=r"labels must lie in \[1, 3500\], got 3501"):
        mnist1d(labels=3501)


def test_the_users_generators_stay_as_they_are():
    module._generate.cache_clear()
    mnist1d.cache_clear()
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    mnist1d()
    assert (random.random(), np.random.random()) == expected


def test_a_missing_package_is_named_with_the_fix(monkeypatch):
    module._generate.cache_clear()
    mnist1d.cache_clear()
    monkeypatch.setitem(sys.modules, "mnist1d.data", None)
    with pytest.raises(UsageError, match=r"^data: MNIST-1D needs the package mnist1d; run pip"):
        mnist1d()
