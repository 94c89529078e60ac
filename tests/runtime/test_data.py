"""The embedded data: disjoint splits, a fixed validation set, shifts by whole pixels."""

import numpy as np
import pytest
import torch

from esper.runtime.data import Dataset, _moved, digits

SPLITS = ("train", "validation", "test")


def images_of(data: Dataset, split: str) -> set[bytes]:
    images = getattr(data, f"{split}_images")
    return {image.numpy().tobytes() for image in images}


def moved_by_hand(image: np.ndarray, down: int, right: int) -> np.ndarray:
    height, width = image.shape
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            if 0 <= y + down < height and 0 <= x + right < width:
                out[y + down, x + right] = image[y, x]
    return out


@pytest.mark.parametrize("down", [-2, 0, 1])
@pytest.mark.parametrize("right", [-1, 0, 2])
def test_images_move_by_whole_pixels_and_what_leaves_is_gone(down: int, right: int):
    images = np.arange(1.0, 61.0).reshape(2, 6, 5)
    moved = _moved(images, down, right)
    assert moved.shape == images.shape
    for image, found in zip(images, moved, strict=True):
        assert np.array_equal(found, moved_by_hand(image, down, right))


def test_a_pixel_lands_where_it_is_sent():
    image = np.zeros((8, 8))
    image[3, 4] = 1.0
    assert np.argwhere(_moved(image, 2, -1)).tolist() == [[5, 3]]
    assert _moved(image, 0, 2)[3, 6] == 1.0
    assert not _moved(image, -4, 0).any()


def test_the_splits_share_no_image():
    data = digits()
    sizes = [len(getattr(data, f"{split}_labels")) for split in SPLITS]
    assert sizes == [1197, 300, 300]
    found = [images_of(data, split) for split in SPLITS]
    assert sum(map(len, found)) == len(set().union(*found)) == 1797


def test_the_splits_share_no_image_at_any_shift():
    plain, shifted = digits(), digits(shift=2)
    assert len(shifted.train_labels) == 25 * 1197
    assert len(shifted.validation_labels) == len(shifted.test_labels) == 300
    assert images_of(plain, "train") <= images_of(shifted, "train")
    reach = [(y, x) for y in range(-2, 3) for x in range(-2, 3)]
    for split in ("validation", "test"):
        own = getattr(plain, f"{split}_images")[..., 0].numpy()
        everywhere = {i.tobytes() for y, x in reach for i in _moved(own, y, x)}
        assert images_of(shifted, split) <= everywhere
        assert not everywhere & images_of(shifted, "train")
        assert torch.equal(getattr(shifted, f"{split}_labels"), getattr(plain, f"{split}_labels"))


def test_the_training_set_holds_every_image_at_every_shift_under_its_label():
    plain, shifted = digits(), digits(shift=1)
    images = plain.train_images[..., 0].numpy()
    expected: dict[bytes, int] = {}
    for y in (-1, 0, 1):
        for x in (-1, 0, 1):
            moved = zip(_moved(images, y, x), plain.train_labels.tolist(), strict=True)
            expected |= {image.tobytes(): label for image, label in moved}
    pairs = zip(shifted.train_images.numpy(), shifted.train_labels.tolist(), strict=True)
    assert {image.tobytes(): label for image, label in pairs} == expected


def test_validation_and_test_are_drawn_at_many_shifts():
    plain, shifted = digits(), digits(shift=2)
    for split in ("validation", "test"):
        still = getattr(plain, f"{split}_images") == getattr(shifted, f"{split}_images")
        unmoved = still.flatten(1).all(1).float().mean()
        assert 0.0 < unmoved < 0.15


@pytest.mark.parametrize("settings", [{}, {"shift": 2, "noise": 0.1}], ids=str)
def test_making_the_data_again_gives_the_same_bits(settings: dict):
    """Reward sees validation, so it must be a fixed set; ``__wrapped__`` goes past the cache."""
    first, again = (digits.__wrapped__(**settings) for _ in range(2))
    for split in SPLITS:
        for part in ("images", "labels"):
            name = f"{split}_{part}"
            assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert digits(**settings) is digits(**settings)


def test_another_seed_splits_otherwise():
    assert images_of(digits.__wrapped__(seed=1), "test") != images_of(digits(), "test")


def test_pixels_lie_in_the_unit_interval_until_noise_is_added():
    plain, noisy = digits(), digits(noise=0.1)
    assert plain.classes == 10
    for split in SPLITS:
        images, labels = getattr(plain, f"{split}_images"), getattr(plain, f"{split}_labels")
        assert images.shape[1:] == (8, 8, 1)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.long
        assert images.min() == 0.0
        assert images.max() == 1.0
        assert labels.unique().tolist() == list(range(10))
        noise = getattr(noisy, f"{split}_images") - images
        assert noise.mean().abs() < 5e-3
        assert noise.std().item() == pytest.approx(0.1, rel=0.05)


def test_moving_the_data_to_a_dtype_keeps_labels_whole():
    data = digits().to(torch.float64, torch.device("cpu"))
    assert data.train_images.dtype == data.validation_images.dtype == torch.float64
    assert data.test_images.dtype == torch.float64
    assert data.train_labels.dtype == torch.long
    assert torch.equal(data.validation_images.float(), digits().validation_images)
