"""Split seeds: every part of a task is split alike, and no image is trained on and tested."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from sklearn.datasets import load_digits
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.runtime import data
from esper.runtime.data import DrawnSplit, FromDirectory, digits
from esper.runtime.task import HELD_OUT_DRAWS
from esper.runtime.tasks import SUITES, Drift, Pretraining, find
from esper_lab.data import shifted_digits
from esper_lab.families import ADAPTATION

SPLIT = 7
HELD_OUT = np.random.default_rng(SPLIT).permutation(1797)[1497:]
"""Rows of scikit-learn's digits that are for test."""


def rows_of(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_the_split_is_that_of_the_seed():
    images, labels = load_digits(return_X_y=True)
    found = find("digits").with_split(SPLIT).data()
    np.testing.assert_array_equal(found.test_images.flatten(1).numpy() * 16, images[HELD_OUT])
    np.testing.assert_array_equal(found.test_labels.numpy(), labels[HELD_OUT])
    assert rows_of(found.test_images) != rows_of(digits().test_images)


def test_the_file_of_digits_holds_what_scikit_learn_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_digits(return_X_y=True)
    for _ in range(2):
        for one, two in zip(data._digits(), expected, strict=True):
            assert (one.dtype, one.shape) == (two.dtype, two.shape)
            np.testing.assert_array_equal(one, two)
        monkeypatch.setattr(data, "find_spec", lambda _: None)  # then through the package


@pytest.mark.parametrize("name", [*SUITES["suite"], *SUITES["held_out"]])
def test_every_task_of_digits_takes_the_seed_for_all_its_data(name: str):
    task = find(name)
    assert task.split_seed == 0
    split = task.with_split(SPLIT)
    assert split.split_seed == SPLIT
    makers = [task.data, *([task.drift.data] if task.drift else [])]
    for maker, found in zip(makers, split.datasets(), strict=True):
        assert isinstance(maker, DrawnSplit)
        assert found is maker.make(seed=SPLIT)


@pytest.mark.parametrize(("number", "seed"), [*product((0, 5, HELD_OUT_DRAWS), (0, SPLIT))])
def test_pretrained_hosts_never_saw_the_test_images_of_their_task(number: int, seed: int):
    task = ADAPTATION.draw(number).with_split(seed)
    assert task.pretraining is not None
    clean = rows_of(task.pretraining.data().train_images)
    # Test images before a shift are the clean ones; two digits of the set are identical twins.
    tested = rows_of(task.datasets()[0].test_images)
    assert len(tested) >= 299
    assert not clean & tested
    assert {task.data.seed, task.pretraining.data.seed} == {seed}  # type: ignore[attr-defined]
    if task.drift is not None:
        assert task.drift.data.seed == seed  # type: ignore[attr-defined]


def test_the_hosts_of_a_family_share_their_pretraining_on_every_split():
    split = {ADAPTATION.draw(number).with_split(SPLIT).pretraining for number in range(20)}
    assert len(split) == 1
    assert split != {ADAPTATION.draw(0).pretraining}


def test_labels_of_a_family_are_drawn_from_the_training_images_of_the_split():
    few = shifted_digits((), 90, 3, seed=SPLIT)
    assert rows_of(few.train_images) <= rows_of(digits(seed=SPLIT).train_images)
    assert rows_of(few.test_images) == rows_of(digits(seed=SPLIT).test_images)


def test_data_with_a_fixed_split_ignore_the_seed():
    files = FromDirectory(lambda folder: digits())
    task = replace(find("digits"), data=files)
    assert task.split_seed is None
    assert task.with_split(SPLIT) == task
    assert find("text_bytes").with_split(SPLIT) == find("text_bytes")


def test_parts_that_are_split_differently_are_refused():
    here, there = DrawnSplit(digits, 1), DrawnSplit(partial(digits, noise=0.1), 2)
    says = "^data: the task 'digits' splits its data with the seeds 1, 2, .*; use one seed$"
    for part in ({"drift": Drift(there, 0.1, 0.2, 0.0)}, {"pretraining": Pretraining(there)}):
        with pytest.raises(UsageError, match=says):
            replace(find("digits"), data=here, **part)
