"""Tasks by name, and what the user is told of a name that is not there."""

import pytest

from esper.leyline.errors import UsageError
from esper.runtime.tasks import TASKS, find


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_is_found_by_the_name_it_bears_and_fits_its_data(name: str):
    task = find(name)
    assert task.name == name
    data = task.data()
    assert task.host.classes == data.classes
    assert task.host.image == tuple(data.train_images.shape[1:])
    assert task.host.slots


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("digit", "digits"), ("digits_shfit", "digits_shift"), ("Digits", "digits")],
)
def test_a_misspelt_name_is_answered_with_the_nearest(typed: str, meant: str):
    with pytest.raises(UsageError) as error:
        find(typed)
    assert repr(typed) in str(error.value)
    assert f"did you mean {meant!r}?" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_like_no_other_is_answered_with_all_there_are():
    with pytest.raises(UsageError) as error:
        find("qqq")
    assert all(name in str(error.value) for name in TASKS)
