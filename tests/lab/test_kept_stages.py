"""What a stage is known by: tasks, with the data functions and their arguments, and members."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime.data import digits
from esper.runtime.tasks import FAMILIES, Pretraining, Task, find_all
from esper_lab.data import Shift, shifted_digits
from esper_lab.play import Population, digest, hosts_of
from tiny_population import TASKS


def data_of(shift: Shift | None, sample: int = 0) -> partial:
    return partial(shifted_digits, shift, 100, sample)


def closure(number: int):
    def data():
        return number

    return data


class Maker:
    def __init__(self, number: int):
        self.number = number

    def __repr__(self) -> str:
        return f"Maker({self.number})"

    def data(self) -> None: ...


DATA = [
    digits,
    partial(digits, shift=1),
    partial(digits, shift=2),
    data_of(None),
    data_of(None, sample=1),
    data_of(Shift("noise", 0.5, 1)),
    data_of(Shift("noise", 0.5, 2)),
    closure(1),
    closure(2),
    lambda: digits(shift=1),
    lambda: digits(shift=2),
    Maker(1).data,
    Maker(2).data,
]


def test_tasks_that_differ_in_their_data_alone_differ():
    found = [digest(replace(TASKS[0], data=data)) for data in DATA]
    assert len({*found}) == len(DATA)
    again = [partial(digits, shift=1), data_of(Shift("noise", 0.5, 1)), closure(1), Maker(1).data]
    same = [digest(replace(TASKS[0], data=data)) for data in again]
    assert same == [found[i] for i in (1, 5, 7, 11)]


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.5},
        {"tuning": "last"},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"host": CnnHost((6, 9), 10, (8, 8, 1))},
        {"pretraining": Pretraining(partial(digits, seed=1), steps=60, hosts=2)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_of_a_task_counts(change):
    assert digest(replace(TASKS[0], **change)) != digest(TASKS[0])


def test_threads_do_not_count_and_identities_do():
    one = Population(TASKS)
    assert digest(hosts_of(replace(one, threads=8))) == digest(hosts_of(one))
    for change in ({"first": 1}, {"seed": 2}, {"data_seed": 3}):
        assert digest(hosts_of(replace(one, **change))) != digest(hosts_of(one))


def test_the_digest_of_the_families_is_the_same_in_every_process():
    code = (
        "from esper.runtime.tasks import FAMILIES, find_all;"
        "from esper_lab.play import digest;"
        "print(digest([find_all([name]) for name in FAMILIES]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tasks: list[list[Task]] = [find_all([name]) for name in FAMILIES]
    assert done.stdout.strip() == digest(tasks)
    assert len({digest(task) for drawn in tasks for task in drawn}) == sum(map(len, tasks))
