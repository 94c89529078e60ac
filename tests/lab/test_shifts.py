"""Shifts of the digits, and MNIST-1D."""

import random
import sys

import numpy as np
import pytest
import torch

from esper.leyline.errors import UsageError
from esper.runtime.data import Dataset, digits
from esper_lab import data as module
from esper_lab.data import (
    CLASSES,
    IMAGE_KINDS,
    KINDS,
    LABEL_KINDS,
    Shift,
    few_digits,
    mnist1d,
    rotate,
    shifted_digits,
    translate,
)

SPLITS = ("train", "validation", "test")
CLEAN = digits()


def images(data: Dataset, split: str = "train") -> np.ndarray:
    return getattr(data, f"{split}_images").numpy()


def labels(data: Dataset, split: str = "train") -> np.ndarray:
    return getattr(data, f"{split}_labels").numpy()


def new_labels(shift: Shift, split: str) -> dict[int, int]:
    """The new label of each class; fails if a class has two."""
    both = labels(CLEAN, split), labels(shift.apply(CLEAN), split)
    pairs = {(int(old), int(new)) for old, new in np.stack(both, 1)}
    assert len(pairs) == CLASSES
    return dict(pairs)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_changes_images_or_labels_of_every_split(kind: str, strength: float, split: str):
    shifted = Shift(kind, strength, 4).apply(CLEAN)
    assert (images(shifted, split) == images(CLEAN, split)).all() == (kind in LABEL_KINDS)
    assert (labels(shifted, split) == labels(CLEAN, split)).all() == (kind in IMAGE_KINDS)
    assert images(shifted, split).shape == images(CLEAN, split).shape
    assert images(shifted, split).dtype == np.float32
    assert shifted.classes == CLEAN.classes


def test_the_data_that_are_shifted_stay_as_they_are():
    before = {split: (images(CLEAN, split).copy(), labels(CLEAN, split).copy()) for split in SPLITS}
    for kind in KINDS:
        Shift(kind, 0.7, 1).apply(CLEAN)
    for split, (pixels, classes) in before.items():
        assert (images(CLEAN, split) == pixels).all()
        assert (labels(CLEAN, split) == classes).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(kind: str):
    def content(seed: int) -> bytes:
        shifted = Shift(kind, 0.6, seed).apply(CLEAN)
        return b"".join(images(shifted, s).tobytes() + labels(shifted, s).tobytes() for s in SPLITS)

    assert content(3) == content(3)
    assert (len({content(seed) for seed in range(8)}) == 1) == (kind == "contrast")


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_rotation_by_quarter_turns_equals_that_of_numpy(quarters: int):
    turned = rotate(CLEAN.train_images, 90.0 * quarters).numpy()
    expected = np.rot90(images(CLEAN), quarters, axes=(1, 2))
    np.testing.assert_allclose(turned, expected, atol=1e-5)


def test_rotation_interpolates_and_keeps_the_centre():
    flat = torch.ones(1, 9, 9, 2)
    turned = rotate(flat, 45.0)
    assert turned.shape == flat.shape
    assert turned[0, 4, 4].tolist() == pytest.approx([1.0, 1.0])
    assert turned[0, 0, 0].max() == 0.0


@pytest.mark.parametrize(("strength", "degrees"), [(0.0, 20.0), (1.0, 90.0)])
def test_strengths_of_rotation(strength: float, degrees: float):
    sides = {-1: 0, 1: 0}
    for seed in range(8):
        turned = Shift("rotation", strength, seed).apply(CLEAN)
        for side in sides:
            expected = rotate(CLEAN.test_images, side * degrees)
            if torch.equal(turned.test_images, expected):
                assert torch.equal(turned.train_images, rotate(CLEAN.train_images, side * degrees))
                sides[side] += 1
    assert sum(sides.values()) == 8
    assert min(sides.values()) > 0


def moved(pixels: np.ndarray, down: int, right: int) -> np.ndarray:
    """Roll in a frame of zeros and cut it off."""
    frame = np.pad(pixels, ((0, 0), (4, 4), (4, 4), (0, 0)))
    return np.roll(frame, (down, right), (1, 2))[:, 4:-4, 4:-4]


@pytest.mark.parametrize(("down", "right"), [(0, 0), (1, 0), (-2, 0), (0, 2), (0, -1), (2, -1)])
def test_translation_equals_a_roll_in_a_frame_of_zeros(down: int, right: int):
    found = translate(CLEAN.test_images, down, right).numpy()
    assert (found == moved(images(CLEAN, "test"), down, right)).all()


@pytest.mark.parametrize(("strength", "pixels"), [(0.0, 1), (1.0, 2)])
def test_strengths_of_translation(strength: float, pixels: int):
    ways = {(pixels, 0), (-pixels, 0), (0, pixels), (0, -pixels)}
    seen = set()
    for seed in range(16):
        shifted = Shift("translation", strength, seed).apply(CLEAN)
        found = [w for w in ways if (images(shifted) == moved(images(CLEAN), *w)).all()]
        assert len(found) == 1
        assert (images(shifted, "test") == moved(images(CLEAN, "test"), *found[0])).all()
        seen.update(found)
    assert seen == ways


@pytest.mark.parametrize(("strength", "deviation"), [(0.0, 0.2), (1.0, 0.8)])
def test_strengths_of_noise_which_is_drawn_for_each_image(strength: float, deviation: float):
    shifted = Shift("noise", strength, 1).apply(CLEAN)
    for split in SPLITS:
        noise = images(shifted, split) - images(CLEAN, split)
        assert noise.std() == pytest.approx(deviation, rel=0.03)
        assert abs(noise.mean()) < 0.02
        assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.5


@pytest.mark.parametrize(("strength", "factor", "bright"), [(0.0, 0.36, 0.32), (1.0, -0.6, 0.8)])
def test_strengths_of_contrast(strength: float, factor: float, bright: float):
    shifted = Shift("contrast", strength, 1).apply(CLEAN)
    for split in SPLITS:
        expected = factor * images(CLEAN, split) + bright
        np.testing.assert_allclose(images(shifted, split), expected, atol=1e-6)


@pytest.mark.parametrize(("strength", "side"), [(0.0, 2), (1.0, 4)])
def test_occlusion_blacks_out_one_square_in_all_images(strength: float, side: int):
    bright = Dataset(*(x for _ in SPLITS for x in (torch.ones(5, 8, 8, 1), torch.arange(5))), 5)
    places = set()
    for seed in range(12):
        shifted = Shift("occlusion", strength, seed).apply(bright)
        hidden = images(shifted) == 0.0
        assert (hidden == hidden[:1]).all()
        assert (hidden == (images(shifted, "test") == 0.0)).all()
        rows, columns = np.nonzero(hidden[0, :, :, 0])
        assert (np.ptp(rows), np.ptp(columns)) == (side - 1, side - 1)
        assert len(rows) == side**2
        places.add((rows[0], columns[0]))
    assert len(places) > 4


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", LABEL_KINDS)
def test_labels_are_permuted_alike_in_all_splits(kind: str, strength: float):
    for seed in range(6):
        shift = Shift(kind, strength, seed)
        maps = [new_labels(shift, split) for split in SPLITS]
        assert maps[0] == maps[1] == maps[2]
        assert sorted(maps[0].values()) == list(range(CLASSES))


@pytest.mark.parametrize(("strength", "count"), [(0.0, 3), (1.0, 10)])
def test_permuted_classes_form_one_cycle(strength: float, count: int):
    for seed in range(6):
        new = new_labels(Shift("permuted", strength, seed), "train")
        changed = [old for old in new if new[old] != old]
        assert len(changed) == count
        cycle = [changed[0]]
        while new[cycle[-1]] != cycle[0]:
            cycle.append(new[cycle[-1]])
        assert sorted(cycle) == sorted(changed)


@pytest.mark.parametrize(("strength", "pairs"), [(0.0, 1), (1.0, 3)])
def test_swapped_classes_form_pairs(strength: float, pairs: int):
    for seed in range(6):
        new = new_labels(Shift("swapped", strength, seed), "train")
        assert sum(new[old] != old for old in new) == 2 * pairs
        assert all(new[new[old]] == old for old in new)


@pytest.mark.parametrize(
    ("kind", "strength", "says"),
    [("blur", 0.5, "kind must be one of noise"), ("noise", 1.1, r"strength must lie in \[0, 1\]")]
    + [("noise", -0.1, "got -0.1"), ("noise", float("nan"), "got nan")],
)
def test_invalid_shift_is_refused(kind: str, strength: float, says: str):
    with pytest.raises(ValueError, match=says):
        Shift(kind, strength, 0)


def test_few_digits_are_a_part_of_the_training_images_alone():
    few = few_digits(100, 7)
    whole = {
        pixels.tobytes(): int(y) for pixels, y in zip(images(CLEAN), labels(CLEAN), strict=True)
    }
    kept = [pixels.tobytes() for pixels in images(few)]
    assert len(set(kept)) == len(kept) == 100
    assert [whole[pixels] for pixels in kept] == labels(few).tolist()
    for split in SPLITS[1:]:
        assert (images(few, split) == images(CLEAN, split)).all()
        assert (labels(few, split) == labels(CLEAN, split)).all()
    assert not (images(few_digits(100, 8)) == images(few)).all()
    assert len(few_digits(len(CLEAN.train_labels), 1).train_labels) == len(CLEAN.train_labels)


@pytest.mark.parametrize("count", [0, 10_000])
def test_a_number_of_labels_out_of_range_is_refused(count: int):
    with pytest.raises(ValueError, match="labels must lie in"):
        few_digits(count, 0)


def test_shifted_digits_are_few_digits_after_the_shifts_in_order():
    turned, exchanged = Shift("rotation", 0.5, 1), Shift("swapped", 0.5, 2)
    assert shifted_digits((), 90, 2) is few_digits(90, 2, 0)
    found = shifted_digits((turned, exchanged), 90, 2)
    expected = exchanged.apply(turned.apply(few_digits(90, 2)))
    assert torch.equal(found.train_images, expected.train_images)
    assert torch.equal(found.train_labels, expected.train_labels)
    assert not torch.equal(found.train_labels, few_digits(90, 2).train_labels)


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
