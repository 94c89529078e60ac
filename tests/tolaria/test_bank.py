"""The data bank: the data set of each row, and when it changes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.kasmina.rng import Purpose, random_bits
from esper.kasmina.seeds import SeedState
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError
from esper.leyline.stages import LIVING, Stage
from esper.runtime.data import Dataset
from esper.runtime.tasks import Drift, Task
from esper.tolaria.bank import DataBank, StackKey
from support import CPU, F64, bank_of, small_host, small_task, task_engine

HOST = small_host()


def plain(level: float, train: int = 20, validation: int = 13, test: int = 7) -> Dataset:
    """Data whose images have distinct values around ``level``; labels cycle through classes."""

    def split(count: int) -> tuple[Tensor, Tensor]:
        values = level + torch.arange(count, dtype=F64) / 1024
        images = values[:, None, None, None].expand(count, *HOST.image).clone()
        return images, torch.arange(count) % HOST.classes

    return Dataset(*split(train), *split(validation), *split(test), classes=HOST.classes)


def task_of(data: Dataset, **changes) -> Task:
    return replace(small_task(HOST), data=lambda: data, **changes)


def drifting(never: float = 0.25, earliest: float = 0.2, latest: float = 0.8) -> Task:
    before, after = plain(1.0), plain(-2.0, train=33)
    return task_of(before, drift=Drift(lambda: after, earliest, latest, never))


def banked(*tasks: Task) -> DataBank:
    return DataBank([(task, task.datasets()) for task in tasks], F64, CPU)


def test_converting_the_dtype_leaves_labels_unchanged():
    data = plain(1.0)
    bank = DataBank([(task_of(data), [data])], torch.float32, CPU)
    for split in ("train", "validation", "test"):
        images, labels = getattr(bank, f"{split}_images"), getattr(bank, f"{split}_labels")
        assert images.dtype == torch.float32
        assert labels.dtype == torch.long
        assert torch.equal(images.double().flatten(), getattr(data, f"{split}_images").flatten())


# --- shared stacks ----------------------------------------------------------------------


def test_tasks_share_a_stack_exactly_if_shapes_and_decay_agree():
    def key(task: Task) -> StackKey:
        return StackKey.of(task, task.datasets())

    data = plain(1.0)
    base = key(task_of(data))
    alike = [
        task_of(plain(5.0, train=99)),
        task_of(data, learning_rate=0.5),
        task_of(data, drift=Drift(lambda: plain(2.0), 0.0, 1.0, 0.5)),
    ]
    for task in alike:
        assert key(task) == base
    wider = small_host(channels=(3, 6))
    others = [
        task_of(plain(1.0, validation=14)),
        task_of(plain(1.0, test=8)),
        task_of(data, weight_decay=0.0),
        task_of(data, host=small_host(slot_names=("r0c0",))),
        task_of(data, host=wider),
    ]
    for task in others:
        assert key(task) != base


@pytest.mark.parametrize("sizes", [{"validation": 14}, {"test": 8}])
def test_a_drift_that_changes_held_back_sizes_is_rejected(sizes: dict[str, int]):
    task = task_of(plain(1.0), drift=Drift(lambda: plain(2.0, **sizes), 0.0, 1.0, 0.5))
    with pytest.raises(UsageError, match=r"^drift: .*make them the same"):
        StackKey.of(task, task.datasets())


# --- minibatches and held-back sets -----------------------------------------------------------


def test_each_group_draws_from_all_of_its_own_data_set():
    first, second, third = plain(1.0, train=20), plain(2.0, train=5), plain(3.0, train=31)
    bank = banked(task_of(first), task_of(second), task_of(third))
    groups, dataset = torch.arange(6), torch.tensor([0, 1, 2, 2, 1, 0])
    drawn = bank.samples(random_bits(3, groups, Purpose.MINIBATCH, 0, 0, 600), dataset)
    images, labels = bank.train_images[drawn], bank.train_labels[drawn]
    for group, data in enumerate((first, second, third, third, second, first)):
        values = data.train_images[:, 0, 0, 0].contiguous()
        found = images[group, :, 0, 0, 0].contiguous()
        place = torch.searchsorted(values, found)
        assert torch.equal(values[place], found)
        assert torch.equal(labels[group], data.train_labels[place])
        assert torch.bincount(place, minlength=len(values)).min() > 0  # every image is drawn
    assert not torch.equal(drawn[2], drawn[3])
    alone = random_bits(3, groups[2:3], Purpose.MINIBATCH, 0, 0, 600)
    assert torch.equal(bank.samples(alone, dataset[2:3]), drawn[2:3])


@pytest.mark.parametrize("split", ["validation", "test"])
def test_each_row_gets_its_own_held_back_set(split: str):
    sets = [plain(1.0), plain(2.0), plain(3.0)]
    bank = banked(*(task_of(data) for data in sets))
    rows = torch.tensor([2, 0, 0, 1])
    images, labels = bank.held_back(split, rows).by_row()
    for row, data in enumerate(rows.tolist()):
        assert torch.equal(images[:, :, :, row], getattr(sets[data], f"{split}_images"))
        assert torch.equal(labels[row], getattr(sets[data], f"{split}_labels"))


def test_a_data_set_is_stored_once_and_shared_by_all_rows():
    data = plain(1.0)
    bank = banked(task_of(data), task_of(data, learning_rate=0.5))
    assert len(bank.train_images) == 20
    images, labels = bank.held_back("validation", torch.zeros(8, dtype=torch.long)).by_row()
    assert images.shape == (13, *HOST.image[:2], 1, HOST.image[2])
    assert torch.equal(images[:, :, :, 0], data.validation_images)
    assert torch.equal(labels, data.validation_labels[None])
    assert bank.seed_rates.tolist() == [5e-3, 0.5]
    back = banked(task_of(data), task_of(plain(2.0), drift=Drift(lambda: data, 0.0, 1.0, 0.5)))
    assert len(back.validation_images) == 2
    assert (back.before.tolist(), back.after.tolist()) == ([0, 1], [0, 0])


# --- drift ------------------------------------------------------------------------------------


def test_drifts_happen_in_their_window_or_never():
    bank, groups, length = bank_of(drifting(never=0.25)), torch.arange(4_000), 40
    task = torch.zeros_like(groups)
    found = bank.switch_steps(3, groups, task, 0, length)
    never = found == length
    assert never.float().mean().item() == pytest.approx(0.25, abs=4 * math.sqrt(0.1875 / 4_000))
    inside = found[~never]
    assert (inside.min().item(), inside.max().item()) == (8, 31)  # 0.2 and 0.8 of 40 steps
    counts = torch.bincount(inside)[8:].double()
    assert ((counts - counts.mean()).square() / counts.mean()).sum() < 57.1  # p = 1e-4, 23 degrees
    assert torch.equal(found, bank.switch_steps(3, groups, task, 0, length))
    subset = torch.tensor([5, 900, 7])
    assert torch.equal(found[subset], bank.switch_steps(3, subset, task[:3], 0, length))
    assert not torch.equal(found, bank.switch_steps(3, groups, task, 1, length))
    assert not torch.equal(found, bank.switch_steps(4, groups, task, 0, length))


@pytest.mark.parametrize(
    ("never", "window", "expected"),
    [
        (1.0, (0.0, 1.0), {40}),
        (0.0, (0.5, 0.5), {20}),
        (0.0, (0.0, 0.0), {0}),
        (0.0, (0.0, 0.1), {0, 1, 2, 3}),
    ],
)
def test_drift_window_and_probability_at_their_bounds(never, window, expected):
    bank, groups = bank_of(drifting(never, *window)), torch.arange(500)
    found = bank.switch_steps(3, groups, torch.zeros_like(groups), 0, 40)
    assert set(found.tolist()) == expected


def test_hosts_are_trained_with_the_settings_of_their_tasks():
    recipe = {"weight_decay": 0.03, "max_gradient_norm": 0.7, "learning_rate": 0.02}
    one = task_of(plain(1.0), host_learning_rate=0.01, **recipe)
    other = replace(task_of(plain(1.0), host_learning_rate=0.0, **recipe), name="other")
    found = task_engine(one, other, task_of=(0, 1, 0)).optimisation(0)
    assert found.host_learning_rate.tolist() == pytest.approx([0.01, 0.0, 0.01])
    assert found.seed_learning_rate.tolist() == [pytest.approx([0.02] * len(HOST.slots))] * 3
    assert (found.weight_decay, found.max_gradient_norm) == (0.03, 0.7)


def test_some_rows_are_measured_on_their_own_data():
    other = replace(task_of(plain(-2.0)), name="other")
    engine = task_engine(task_of(plain(1.0)), other, task_of=(0, 1, 1))

    def losses(some: Tensor | None) -> Tensor:
        seeds = SeedState.dormant((3 if some is None else len(some), len(HOST.slots)), CPU)
        return engine.measure(seeds, 0, committed=False, rows=some).scores.loss

    every, some = losses(None), torch.tensor([2, 0])
    assert torch.allclose(losses(some), every[some], rtol=1e-12)
    assert len(set(every.tolist())) == 3


def test_only_living_seeds_have_parameters():
    engine = task_engine(task_of(plain(1.0)), task_of=[0] * len(Stage))
    state = SeedState.dormant((len(Stage), len(HOST.slots)), CPU)
    kind = BLUEPRINTS.index("conv_light")
    state.stage[:] = torch.tensor(list(Stage))[:, None]
    state.blueprint[:] = kind
    found = engine.seed_parameters(state)
    whole = torch.tensor([slot.layouts[kind].size for slot in HOST.slots])
    for stage, counts in zip(Stage, found, strict=True):
        assert torch.equal(counts, whole if stage in LIVING else 0 * whole), stage


def test_each_environment_trains_and_validates_on_the_later_data_from_its_switch_on():
    """Images are around 1 before the switch, around -2 after it."""
    engine = task_engine(drifting(never=0.0), task_of=[0] * 6, length=40)
    switches = engine.switch_step.tolist()
    assert len(set(switches)) > 2
    for step in sorted({near for switch in switches for near in (switch - 1, switch)}):
        late = torch.tensor([step >= switch for switch in switches])
        images, _ = next(iter(engine.minibatches(step)))
        assert torch.equal(images.movedim(3, 0).flatten(1).lt(0.0).all(1), late)
        held_back = engine.bank.validation_images[engine.datasets(step)]
        assert torch.equal(held_back.flatten(1).lt(0.0).all(1), late)


def test_a_task_without_drift_never_switches():
    bank, groups = bank_of(small_task(HOST)), torch.arange(500)
    assert set(bank.switch_steps(3, groups, torch.zeros_like(groups), 0, 40).tolist()) == {40}
