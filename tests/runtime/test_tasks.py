"""Tasks: lookup by name, contents, and the errors for unknown names."""

from dataclasses import replace

import pytest
import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.leyline.errors import UsageError
from esper.runtime import data
from esper.runtime.tasks import (
    FAMILIES,
    SUITES,
    TASKS,
    Drift,
    Pretraining,
    Task,
    agree,
    find,
    find_all,
    task,
)

REGISTERED = sorted(set(TASKS) - set(SUITES["cifar"]))
"""Tasks whose data are shipped with Esper."""


@pytest.mark.parametrize("name", REGISTERED)
def test_task_is_found_by_its_name_and_fits_its_data(name: str):
    found = find(name)
    assert found.name == name
    for dataset in found.datasets():
        assert found.host.classes == dataset.classes
        assert found.host.image == tuple(dataset.train_images.shape[1:])
    assert len(found.datasets()) == (1 if found.drift is None else 2)
    assert found.host.slots
    assert found.host.parameter_count == sum(f.size for f in found.host.layout.fields) > 0


def test_suites_are_disjoint_and_contain_only_known_tasks():
    members = [name for suite in SUITES.values() for name in suite]
    assert len(set(members)) == len(members)
    draws = {name for name in members if name.partition(":")[0] in FAMILIES}
    assert set(members) - draws <= set(TASKS)
    assert draws == {n for f in FAMILIES.values() for held in (0, 1) for n in f.names(bool(held))}
    assert SUITES["suite"][0] == "digits_shift"
    assert len(SUITES["held_out"]) >= 8


def content(name: str) -> tuple:
    """Everything that an environment can observe of a task, by value."""
    found = find(name)
    bits = tuple(
        getattr(dataset, part).numpy().tobytes()
        for dataset in found.datasets()
        for part in ("train_images", "train_labels", "validation_images")
    )
    window = found.drift and (found.drift.earliest, found.drift.latest, found.drift.never)
    host = found.host
    return (host, bits, window, found.episode_length, found.max_batches, found.batch_size)


def test_no_two_tasks_are_equal():
    contents = [content(name) for name in REGISTERED]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize(
    ("name", "settings", "channels"),
    [
        ("digits_shift", {"shift": 2, "noise": 0.1}, (4, 8)), ("digits", {}, (8, 16)),
        ("digits_shift_small", {"shift": 1, "noise": 0.1}, (4, 8)),
        ("digits_noisy", {"shift": 2, "noise": 0.2}, (4, 8)),
        ("digits_few_labels", {"shift": 2, "noise": 0.1, "label_fraction": 0.3}, (4, 8)),
        ("digits_drift", {"noise": 0.1}, (4, 8)),
        ("digits_shift_far", {"shift": 3, "noise": 0.1}, (4, 8)),
        ("digits_shift_near", {"shift": 1, "noise": 0.2}, (4, 8)),
        ("digits_noisier", {"shift": 2, "noise": 0.3}, (4, 8)),
        ("digits_clear", {"shift": 2, "noise": 0.05}, (4, 8)),
        ("digits_five", {"shift": 2, "noise": 0.1, "classes": 5}, (4, 8)),
        ("digits_turned", {"noise": 0.1, "rotation": 3}, (4, 8)),
        ("digits_narrow", {"shift": 2, "noise": 0.1}, (2, 4)),
        ("digits_wide", {"shift": 2, "noise": 0.1}, (8, 16)),
        ("digits_deep", {"shift": 2, "noise": 0.1}, (4, 8, 8)),
        ("digits_long", {"shift": 2, "noise": 0.1}, (4, 8)),
    ],
)  # fmt: skip
def test_every_task_matches_its_documentation(name: str, settings: dict, channels: tuple[int, ...]):
    found = find(name)
    assert found.host.channels == channels
    assert torch.equal(found.data().train_images, data.digits(**settings).train_images)
    assert torch.equal(found.data().test_images, data.digits(**settings).test_images)
    assert found.episode_length == (60 if name == "digits_long" else 40)


def test_digits_drift_becomes_digits_shift():
    drift = find("digits_drift").drift
    assert drift is not None
    assert (drift.earliest, drift.latest, drift.never) == (0.1, 0.6, 1 / 3)
    assert drift.data() is find("digits_shift").data()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("digit", "digits"), ("digits_shfit", "digits_shift"), ("Digits", "digits"), ("suit", "suite")]
    + [("heldout", "held_out")],
)
def test_misspelt_name_error_suggests_the_nearest_name(typed: str, meant: str):
    for look_up in (find, lambda name: find_all(["digits_shift", name])):
        with pytest.raises(UsageError) as error:
            look_up(typed)
        assert repr(typed) in str(error.value)
        assert f"did you mean {meant!r}?" in str(error.value)
        assert "\n" not in str(error.value)


def test_unknown_name_error_lists_all_names():
    with pytest.raises(UsageError) as error:
        find("qqq")
    assert all(name in str(error.value) for name in [*TASKS, *SUITES])


def test_suite_instead_of_a_task_error_lists_its_tasks():
    with pytest.raises(UsageError, match=r"'suite' is a suite; .*digits_few_labels"):
        find("suite")


def names_of(*wanted: str) -> list[str]:
    return [found.name for found in find_all(wanted)]


def test_find_all_keeps_order_and_expands_suites():
    assert names_of("digits_long", "digits") == ["digits_long", "digits"]
    assert names_of("suite") == list(SUITES["suite"])
    assert names_of("digits_wide", "suite", "digits_deep") == [
        "digits_wide",
        *SUITES["suite"],
        "digits_deep",
    ]


@pytest.mark.parametrize(
    ("wanted", "double"),
    [
        (["digits", "digits"], "digits"),
        (["suite", "digits"], "digits"),
        (["digits_drift", "suite"], "digits_drift"),
        (["suite", "suite"], "digits_shift"),
    ],
)
def test_duplicate_task_is_refused(wanted: list[str], double: str):
    with pytest.raises(UsageError, match=rf"task: '{double}' is given twice"):
        find_all(wanted)


def test_empty_list_error_names_the_suites():
    with pytest.raises(UsageError, match=r"task: no task .*suite, held_out"):
        find_all([])


def test_defaults_are_those_of_the_recorded_results():
    task = Task("plain", "digits", CnnHost((4, 4), 10, (8, 8, 1)), data.digits)
    names = "episode_length", "max_batches", "batch_size", "learning_rate", "max_gradient_norm"
    assert [getattr(task, name) for name in names] == [40, 8, 64, 5e-3, 1.0]
    assert (task.price, task.weight_decay, task.deadline) == (0.05, 0.0, 1.0)
    before = Pretraining(data.digits)
    assert (before.steps, before.learning_rate, before.hosts, before.seed) == (20, 1e-2, 8, 0)


def test_agree_returns_the_common_budget():
    assert agree(find_all(["suite"])) == (40, 8, 64, None)
    assert agree([find("digits_long")]) == (60, 8, 64, None)


@pytest.mark.parametrize("field", ["episode_length", "max_batches", "batch_size", "max_seeds"])
def test_differing_budgets_error_names_tasks_field_and_flag(field: str):
    first, second = find_all(["digits", "digits_shift"])
    tasks = [first, replace(second, **{field: 17}), find("digits_wide")]
    own = getattr(first, field) or "no limit"
    with pytest.raises(UsageError) as error:
        agree(tasks)
    message = str(error.value)
    assert message.startswith(f"{field}: ")
    assert f"{own} in digits, digits_wide but 17 in digits_shift" in message
    assert f"--{field.replace('_', '-')}" in message
    fields = "episode_length", "max_batches", "batch_size", "max_seeds"
    budgets = dict(zip(fields, agree([first]), strict=True))
    assert agree(tasks, **{field: 5}) == tuple((budgets | {field: 5}).values())


def test_given_budget_overrides_that_of_the_tasks():
    assert agree(find_all(["suite"]), 7, 3, 16, 1) == (7, 3, 16, 1)


@pytest.mark.parametrize(
    ("window", "says"),
    [
        ((0.6, 0.1, 0.5), "0.6 and latest 0.1"),
        ((-0.1, 0.5, 0.5), "earliest -0.1"),
        ((0.5, 1.1, 0.5), "latest 1.1"),
        ((float("nan"), 0.5, 0.5), "earliest nan"),
        ((0.1, 0.6, 1.5), "never .* 1.5"),
        ((0.1, 0.6, -0.5), "never .* -0.5"),
        ((0.1, 0.6, float("nan")), "never .* nan"),
    ],
)
def test_invalid_drift_is_refused(window: tuple, says: str):
    with pytest.raises(UsageError, match=f"^drift: .*{says}"):
        Drift(data.digits, *window)


@pytest.mark.parametrize("window", [(0.0, 1.0, 0.0), (0.5, 0.5, 1.0)])
def test_drift_accepts_the_ends_of_its_ranges(window: tuple):
    Drift(data.digits, *window)


def coloured() -> data.Dataset:
    """Digits with three colour channels."""
    plain = data.digits()
    splits = ("train_images", "validation_images", "test_images")
    return replace(plain, **{name: getattr(plain, name).repeat(1, 1, 1, 3) for name in splits})


@pytest.mark.parametrize(
    ("after", "says"),
    [(coloured, r"\(8, 8, 3\)"), (lambda: data.digits(classes=5), "of 5 classes")],
)
def test_data_that_do_not_fit_the_host_are_refused_before_and_after_a_drift(after, says: str):
    host = find("digits").host
    with pytest.raises(UsageError, match=f"^data: .*{says}"):
        Task("mine", "mine", host, after).datasets()
    drifting = Task("mine", "mine", host, data.digits, drift=Drift(after, 0.1, 0.6, 0.5))
    with pytest.raises(UsageError, match=f"^drift: .*{says}"):
        drifting.datasets()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"episode_length": 0}, "episode_length: .*'mine'"),
        ({"max_batches": 0}, "max_batches: .*'mine'"),
        ({"batch_size": 1}, "batch_size: .*'mine'"),
        ({"max_seeds": 0}, "max_seeds: .*'mine'"),
        ({"price": -0.1}, "price: must be 0 or more, got -0.1 in the task 'mine'"),
        ({"price": float("nan")}, "price: must be 0 or more, got nan"),
    ],
)
def test_an_invalid_budget_or_price_is_refused(settings: dict, says: str):
    with pytest.raises(UsageError, match=f"^{says}"):
        Task("mine", "mine", find("digits").host, data.digits, **settings)
    assert Task("mine", "mine", find("digits").host, data.digits, price=0.0).price == 0.0


@pytest.mark.parametrize("settings", [{"steps": 0}, {"hosts": 0}, {"learning_rate": 0.0}])
def test_invalid_pretraining_is_refused(settings: dict):
    with pytest.raises(UsageError, match=f"^pretraining: {next(iter(settings))} must be"):
        Pretraining(data.digits, **settings)


def test_directory_of_the_data_applies_to_drift_and_pretraining_too(tmp_path):
    read = data.FromDirectory(lambda folder: data.digits())
    drift, before = Drift(read, 0.1, 0.2, 0.0), Pretraining(read)
    made = Task("mine", "mine", find("digits").host, read, drift=drift, pretraining=before)
    moved = made.in_directory(tmp_path)
    assert moved.drift is not None
    assert moved.pretraining is not None
    places = [moved.data, moved.drift.data, moved.pretraining.data]
    assert [place.directory for place in places] == [tmp_path] * 3  # type: ignore[attr-defined]


def named(function: str, name: str):
    """A factory called ``function`` of a task called ``name``."""

    def factory() -> Task:
        return Task(name, "mine", find("digits").host, data.digits)

    factory.__name__ = function
    return factory


def test_task_is_registered_under_the_name_of_its_factory(scratch_register: None):
    factory = named("mine", "mine")
    assert task(factory) is factory
    assert find("mine").name == "mine"
    assert names_of("mine", "digits") == ["mine", "digits"]


@pytest.mark.parametrize(
    ("function", "name", "says"),
    [
        ("digits", "digits", "'digits' is already registered"),
        ("held_out", "held_out", "'held_out' is the name of a suite"),
        ("mine", "yours", "'mine' makes a task called 'yours'"),
    ],
)
def test_taken_or_mismatched_name_is_refused(
    scratch_register: None, function: str, name: str, says: str
):
    before = dict(TASKS)
    with pytest.raises(UsageError, match=f"^task: .*{says}"):
        task(named(function, name))
    assert before == TASKS


def test_draws_of_a_family_have_at_most_nine_digits() -> None:
    assert find(f"one_seed:{10**9 - 1}").name == f"one_seed:{10**9 - 1}"
    for number in (str(10**9), "0x1", "-1", ""):
        with pytest.raises(UsageError, match="give a number of at most nine digits"):
            find(f"one_seed:{number}")
