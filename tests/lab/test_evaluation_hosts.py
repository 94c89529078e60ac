"""The hosts of an evaluation: tasks and splits in turn, by horizon, and parts that are joined."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from esper.leyline.errors import UsageError
from esper.runtime.tasks import SUITES, Family, Task, add_family, find, find_all
from esper_lab.evaluation import Evaluation, Rung
from esper_lab.hosts import MIN_TRAINING, evaluation_hosts, hosts_by_horizon, tasks_in_turn
from esper_lab.ladder import join_parts
from esper_lab.play import Hosts, digest, hosts_of
from tiny_population import tiny


def only(found: list[Hosts]) -> Hosts:
    (hosts,) = found
    return hosts


def identity(hosts: Hosts) -> str:
    return digest(hosts_of(hosts.training), hosts_of(hosts.fresh))


# --- which hosts -------------------------------------------------------------------------------


def test_every_task_meets_every_split_and_so_do_the_draws_of_a_family():
    some = (find_all(["adaptation"])[:count] for count in (1, 4, 6, 16))
    for tasks in (
        find_all(["suite"]),
        *some,
    ):  # in numbers that share a factor with the splits, too
        hosts = tasks_in_turn(tasks, 8 * len(tasks), range(1, 9))
        assert len({(task.name, task.split_seed) for task in hosts}) == 8 * len(tasks)
        assert np.ptp(np.bincount([task.split_seed or 0 for task in hosts[:24]])[1:]) <= 1
    draws = tasks_in_turn(find_all(["adaptation_held_out"]), 128, range(1, 9))
    assert np.bincount([task.split_seed or 0 for task in draws]).tolist() == [0, *[16] * 8]
    plain = tasks_in_turn(find_all(["suite"]), 8, ())
    assert plain == (*plain[:7], plain[0])
    assert plain[0] is find("digits_shift")


def test_a_family_is_scored_on_held_out_draws_and_a_suite_on_other_identities():
    family = only(evaluation_hosts("adaptation", 20, 258, 1))
    assert [task.name for task in family.training.tasks] == [f"adaptation:{i}" for i in range(20)]
    held_out = [task.name for task in find_all(["adaptation_held_out"])]
    assert [task.name for task in family.fresh.tasks] == [*held_out, *held_out[:2]]
    one = only(evaluation_hosts("digits", 20, 4, 1))
    assert {task.name for task in one.fresh.tasks} == {"digits"}
    assert one.fresh.first >= one.training.first + 20
    suite = only(evaluation_hosts("suite", 20, 7, 1))
    assert [task.name for task in suite.fresh.tasks] == [*SUITES["suite"]]


def test_rules_for_held_out_tasks_and_draws_are_tuned_on_training_tasks():
    tuned_on = {task.name for task in evaluation_hosts("held_out", 20, 20, 1)[0].training.tasks}
    assert tuned_on == {*SUITES["suite"]}
    draws = evaluation_hosts("adaptation_held_out", 20, 40, 1)
    assert identity(only(draws)) == identity(only(evaluation_hosts("adaptation", 20, 40, 1)))


def test_fresh_hosts_have_the_splits_in_turn_and_rules_are_tuned_on_others():
    for suite in ("adaptation", "suite", "digits"):
        hosts = only(evaluation_hosts(suite, 40, 80, 1))
        seeds = [task.split_seed for task in hosts.fresh.tasks]
        assert np.bincount(seeds).tolist() == [5] * 16
        assert {task.split_seed for task in hosts.training.tasks} == {*range(16, 32)}
    suite_hosts = only(evaluation_hosts("suite", 40, 28, 1)).fresh.tasks
    assert len({(task.name, task.split_seed) for task in suite_hosts}) == 28
    five, six = (only(evaluation_hosts("digits", 20, 4, 1, (seed,))) for seed in (5, 6))
    assert {task.split_seed for task in five.fresh.tasks} == {5}
    assert {task.split_seed for task in five.training.tasks} == {6}
    assert digest(hosts_of(five.fresh)) != digest(hosts_of(six.fresh))


# --- by horizon --------------------------------------------------------------------------------


def test_held_out_hosts_are_played_by_horizon_and_rules_are_tuned_on_other_splits():
    found = hosts_by_horizon("suite", "held_out", (14, 20), range(8), 1)
    assert [{task.episode_length for task in p.fresh.tasks} for p in found] == [{40}, {60}]
    names = [task.name for part in found for task in part.fresh.tasks]
    assert sorted(names) == sorted(2 * SUITES["held_out"])
    first, second = (part.fresh for part in found)
    assert second.first == first.first + len(first.tasks)
    assert [len(part.fresh.tasks) for part in found] == [18, 2]
    for part in found:
        assert len({task.horizon for task in part.fresh.tasks}) == 1
        # The only training hosts there are, and their episodes are no longer.
        assert part.training == found[0].training
        assert {task.split_seed for task in part.fresh.tasks} <= set(range(8))
        assert {task.split_seed for task in part.training.tasks} <= set(range(8, 16))
    same = hosts_by_horizon("adaptation", "adaptation_held_out", (20, 40), range(16), 1)
    assert identity(only(same)) == identity(only(evaluation_hosts("adaptation", 20, 40, 1)))


def mixed(number: int, lengths: tuple[int, ...]) -> Task:
    """Every second draw has the second length."""
    host, name = tiny(number // 2 % 2), f"mixed:{number}"
    return replace(host, name=name, family="mixed", episode_length=lengths[number % 2])


def family_of(*lengths: int) -> None:
    add_family(Family("mixed", "mixed", lambda number: mixed(number, lengths), 128, 4))


@pytest.mark.usefixtures("scratch_register")
def test_each_part_is_tuned_on_the_training_hosts_of_its_horizon():
    family_of(12, 8)
    found = evaluation_hosts("mixed", 2 * MIN_TRAINING, 8, 1)
    identities: list[int] = []
    for part, length in zip(found, (12, 8), strict=True):
        for population, count in ((part.training, MIN_TRAINING), (part.fresh, 4)):
            assert {task.episode_length for task in population.tasks} == {length}
            assert len(population.tasks) == count
            identities += range(population.first, population.first + count)
    assert len(set(identities)) == len(identities)
    too_few = (
        rf"^training_hosts: only {MIN_TRAINING - 1} of {2 * MIN_TRAINING - 1} training hosts "
        "have the horizon of mixed:1000001, .*; give more, or name one task$"
    )
    with pytest.raises(UsageError, match=too_few):
        evaluation_hosts("mixed", 2 * MIN_TRAINING - 1, 8, 1)
    with pytest.raises(UsageError, match=r"^hosts: only one of 3 fresh hosts .*; give at least 8$"):
        evaluation_hosts("mixed", 2 * MIN_TRAINING, 3, 1)


@pytest.mark.usefixtures("scratch_register")
def test_no_rule_is_tuned_on_hosts_whose_episodes_are_longer():
    family_of(12, 12)
    short = Family(
        "short", "short",
        lambda number: replace(mixed(number, (8, 8)), name=f"short:{number}", family="short"), 4, 4,
    )  # fmt: skip
    add_family(short)
    with pytest.raises(UsageError, match=r"^suite: no rule can be tuned for short:0, .* of mixed "):
        hosts_by_horizon("mixed", "short", (20, 4), (), 1)
    lessons = only(hosts_by_horizon("short", "mixed", (4, 4), (), 1)).training
    assert lessons.tasks[0].name == "short:0"


# --- joined ------------------------------------------------------------------------------------

NAMES = "never grow", "best fixed schedule", "tree", "clairvoyant per host"


def evaluation(hosts: int, suite: str, names: tuple[str, ...] = NAMES) -> Evaluation:
    draws = np.random.default_rng(hosts)

    def values() -> list[float]:
        return draws.normal(size=hosts).tolist()

    rungs = [
        Rung(name, False, values(), values(), values(), [1] * hosts, values()) for name in names
    ]
    tasks, splits = [suite] * hosts, [None] * hosts
    return Evaluation("rule", suite, 24, tasks, ["never", "one"], rungs, splits, rents=values())


def test_parts_are_joined_in_order_without_the_rungs_that_one_lacks():
    first = evaluation(4, "digits", (*NAMES[:3], "best plan per task", NAMES[3]))
    second = evaluation(2, "digits_long")
    found = join_parts([first, second])
    assert [rung.name for rung in found.rungs] == [*NAMES]
    assert found.tasks == ["digits"] * 4 + ["digits_long"] * 2
    assert found.splits == [None] * 6
    assert found.rents == first.rents + second.rents
    for column in ("utility", "validation", "added", "chosen", "score"):
        for place, (one, other) in ((0, (0, 0)), (3, (4, 3))):
            whole = getattr(first.rungs[one], column) + getattr(second.rungs[other], column)
            assert getattr(found.rungs[place], column) == whole
    chosen_by_none = msgspec.structs.replace(second.rungs[2], chosen=None)
    second.rungs[2] = first.rungs[2] = chosen_by_none
    assert join_parts([first, second]).rungs[2].chosen is None


def test_a_single_part_stays_as_it_is():
    one = msgspec.structs.replace(evaluation(4, "digits"), shipped="made here")
    assert join_parts([one]) == one
