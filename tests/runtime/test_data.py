"""Data sets: digits, and conversion of data that exist."""

import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from esper.leyline.errors import UsageError
from esper.runtime.data import Dataset, _shift, digits, read_dataset

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


@pytest.mark.parametrize("down", [-4, -2, 0, 1])
@pytest.mark.parametrize("right", [-1, 0, 2])
def test_shift_moves_whole_pixels_and_drops_those_outside(down: int, right: int):
    images = np.arange(1.0, 61.0).reshape(2, 6, 5)
    moved = _shift(images, down, right)
    assert moved.shape == images.shape
    for image, found in zip(images, moved, strict=True):
        assert np.array_equal(found, moved_by_hand(image, down, right))


def test_splits_share_no_image():
    data = digits()
    sizes = [len(getattr(data, f"{split}_labels")) for split in SPLITS]
    assert sizes == [1197, 300, 300]
    found = [images_of(data, split) for split in SPLITS]
    assert sum(map(len, found)) == len(set().union(*found)) == 1797


def test_shifts_multiply_the_training_set_and_keep_the_labels_of_the_others():
    plain, shifted = digits(), digits(shift=2)
    assert len(shifted.train_labels) == 25 * 1197
    assert len(shifted.validation_labels) == len(shifted.test_labels) == 300
    assert images_of(plain, "train") <= images_of(shifted, "train")
    for split in ("validation", "test"):
        assert torch.equal(getattr(shifted, f"{split}_labels"), getattr(plain, f"{split}_labels"))


def test_training_set_holds_every_image_at_every_shift_with_its_label():
    plain, shifted = digits(), digits(shift=1)
    images = plain.train_images[..., 0].numpy()
    expected: dict[bytes, int] = {}
    for y in (-1, 0, 1):
        for x in (-1, 0, 1):
            moved = zip(_shift(images, y, x), plain.train_labels.tolist(), strict=True)
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
def test_data_are_reproducible(settings: dict):
    """Rewards depend on validation, so it must be a fixed set; ``__wrapped__`` skips the cache."""
    first, again = (digits.__wrapped__(**settings) for _ in range(2))
    for split in SPLITS:
        for part in ("images", "labels"):
            name = f"{split}_{part}"
            assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert digits(**settings) is digits(**settings)


def test_another_seed_gives_another_split():
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


FINGERPRINTS = [
    ({}, "863c2f8fd488 85ba21081594 d1ff21a87555 794d87ba24d0 4ecf398db0ee 7f36fc4c505d"),
    (
        {"shift": 2, "noise": 0.1},
        "de7d52ab6c86 7a1a329f368e ab9a06891c7b 794d87ba24d0 d46131bce035 7f36fc4c505d",
    ),
    (
        {"shift": 1, "noise": 0.1, "seed": 3},
        "1bbaa8aeb083 8a9e14485e27 6784dc4cb14f d88cd7fcfa18 7428d7e78702 721589c87fbf",
    ),
    (
        {"noise": 0.2},
        "20e470667c60 85ba21081594 607f78bc3eaf 794d87ba24d0 28228e490b29 7f36fc4c505d",
    ),
]
"""First digits of the SHA-256 of the images and labels of all splits when the first results were
measured. Old and new results are comparable only while these are unchanged."""


@pytest.mark.parametrize(
    ("settings", "expected"), FINGERPRINTS, ids=[str(s) for s, _ in FINGERPRINTS]
)
def test_data_equal_those_of_the_first_results(settings: dict, expected: str):
    data = digits(**settings)
    parts = (getattr(data, f"{split}_{part}") for split in SPLITS for part in ("images", "labels"))
    assert [hashlib.sha256(p.numpy().tobytes()).hexdigest()[:12] for p in parts] == expected.split()


def classes_of(labels: torch.Tensor) -> list[int]:
    return torch.bincount(labels, minlength=10).tolist()


@pytest.mark.parametrize("fraction", [0.001, 0.3, 0.75])
def test_label_fraction_applies_to_every_class(fraction: float):
    plain, fewer = digits(), digits(label_fraction=fraction)
    expected = [max(1, round(fraction * n)) for n in classes_of(plain.train_labels)]
    assert classes_of(fewer.train_labels) == expected
    assert images_of(fewer, "train") < images_of(plain, "train")


def test_label_fraction_keeps_images_at_every_shift_and_other_splits():
    settings = {"shift": 1, "noise": 0.1}
    whole, fewer = digits(**settings), digits(**settings, label_fraction=0.3)
    base = digits(label_fraction=0.3)
    assert classes_of(fewer.train_labels) == [9 * n for n in classes_of(base.train_labels)]
    assert torch.equal(fewer.train_labels, base.train_labels.repeat(9))
    # Noise belongs to the image, so the images that remain are bitwise the same as in the full set.
    assert images_of(fewer, "train") < images_of(whole, "train")
    clean = digits(shift=1, label_fraction=0.3).train_images[..., 0].numpy()
    kept = digits(label_fraction=0.3).train_images[..., 0].numpy()
    everywhere = {i.tobytes() for y in (-1, 0, 1) for x in (-1, 0, 1) for i in _shift(kept, y, x)}
    assert {image.tobytes() for image in clean} == everywhere
    for split in ("validation", "test"):
        for part in ("images", "labels"):
            name = f"{split}_{part}"
            assert torch.equal(getattr(whole, name), getattr(fewer, name)), name


def test_larger_label_fraction_only_adds_images():
    few, more = (images_of(digits(label_fraction=part), "train") for part in (0.1, 0.3))
    assert few < more


def test_classes_keeps_the_first_digits_of_every_split():
    whole, five = digits(shift=1, noise=0.1), digits(shift=1, noise=0.1, classes=5)
    assert five.classes == 5
    for split in SPLITS:
        images, labels = getattr(whole, f"{split}_images"), getattr(whole, f"{split}_labels")
        assert torch.equal(getattr(five, f"{split}_labels"), labels[labels < 5])
        assert torch.equal(getattr(five, f"{split}_images"), images[labels < 5])


def turned_by_hand(image: np.ndarray) -> np.ndarray:
    """Rotate by a quarter turn: the last column becomes the first row."""
    size = len(image)
    return np.array([[image[y, size - 1 - x] for y in range(size)] for x in range(size)])


def test_training_set_holds_every_image_at_every_quarter_turn():
    plain, turned = digits(), digits(rotation=3)
    expected: dict[bytes, int] = {}
    for image, label in zip(plain.train_images[..., 0].numpy(), plain.train_labels, strict=True):
        for _ in range(4):
            expected[image.tobytes()] = int(label)
            image = turned_by_hand(image)
    pairs = zip(turned.train_images.numpy(), turned.train_labels.tolist(), strict=True)
    assert {image.tobytes(): label for image, label in pairs} == expected
    assert len(turned.train_labels) == 4 * 1197


def test_held_back_images_have_one_rotation_and_are_not_in_training():
    plain, turned = digits(), digits(rotation=3)
    for split in ("validation", "test"):
        drawn = []
        own = getattr(plain, f"{split}_images")[..., 0].numpy()
        found = getattr(turned, f"{split}_images")[..., 0].numpy()
        assert len(found) == len(own) == 300
        for image, shown in zip(own, found, strict=True):
            turns = [image]
            for _ in range(3):
                turns.append(turned_by_hand(turns[-1]))
            drawn += [n for n, turn in enumerate(turns) if np.array_equal(turn, shown)]
        assert len(drawn) >= 300
        assert min(np.bincount(drawn, minlength=4)) > 40
        assert not images_of(turned, split) & images_of(turned, "train")


VARIATIONS = [
    {"shift": 1}, {"shift": 2}, {"rotation": 3}, {"rotation": 1, "shift": 1}, {"classes": 5},
    {"label_fraction": 0.3}, {"classes": 4, "label_fraction": 0.5, "shift": 1, "rotation": 2},
]  # fmt: skip


@pytest.mark.parametrize("settings", VARIATIONS, ids=str)
def test_no_variation_mixes_the_splits(settings: dict):
    """Compares every pose of the base images of a split with the other splits of the variation."""
    plain, varied = digits(), digits(**settings)
    reach = settings.get("shift", 0)
    poses = {}
    for split in SPLITS:
        images = getattr(plain, f"{split}_images")[..., 0].numpy()
        poses[split] = {
            image.tobytes()
            for turns in range(settings.get("rotation", 0) + 1)
            for y in range(-reach, reach + 1)
            for x in range(-reach, reach + 1)
            for image in _shift(np.rot90(images, turns, (1, 2)), y, x)
        }
    for split in SPLITS:
        assert images_of(varied, split) <= poses[split]
        for other in SPLITS:
            assert split == other or not images_of(varied, split) & poses[other]


@pytest.mark.parametrize(
    "settings",
    [
        {"shift": -1}, {"shift": 8}, {"noise": -0.1}, {"noise": float("nan")},
        {"label_fraction": 0.0}, {"label_fraction": 1.5}, {"classes": 1}, {"classes": 11},
        {"rotation": 4},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_out_of_range_are_refused(settings: dict):
    with pytest.raises(ValueError, match=next(iter(settings))):
        digits(**settings)


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (torch.zeros(3, 8, 8, 1), torch.tensor([0, 1, 2]), r"labels .* \[0, 2\]"),
        (torch.zeros(3, 8, 8, 1), torch.tensor([0, 1, -1]), r"labels .* \[-1, 1\]"),
        (torch.zeros(3, 8, 8, 1), torch.tensor([0, 1]), "one label per image"),
        (torch.zeros(0, 8, 8, 1), torch.tensor([], dtype=torch.long), "at least one image"),
    ],
)
@pytest.mark.parametrize("split", SPLITS)
def test_inconsistent_data_error_names_the_split(
    images: torch.Tensor, labels: torch.Tensor, says: str, split: str
):
    good = {"images": torch.zeros(2, 8, 8, 1), "labels": torch.tensor([0, 1])}
    parts = {f"{s}_{part}": value for s in SPLITS for part, value in good.items()}
    parts |= {f"{split}_images": images, f"{split}_labels": labels}
    with pytest.raises(UsageError, match=says) as error:
        Dataset(**parts, classes=2)
    assert f"the {split} split" in str(error.value)


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
