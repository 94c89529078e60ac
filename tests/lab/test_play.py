"""Playing plans and policies, and stages that are kept."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime.data import digits
from esper.runtime.tasks import FAMILIES, Pretraining, Task, find_all
from esper.simic.growth.environment import GrowthEnv
from esper.tamiyo.baselines import NeverActor
from esper.tamiyo.policy.features import HOST_FEATURES, SLOT_FEATURES
from esper.tamiyo.random_actor import RandomActor
from esper_lab import play as module
from esper_lab.data import Shift, shifted_digits
from esper_lab.plans import NEVER, library
from esper_lab.play import Outcome, Population, Rules, digest, hosts_of, play, play_plans
from tiny_population import LARGE, TASKS, growing, hosts

HOSTS = hosts(4, first=5)
AT_ONCE = next(plan for plan in library() if plan.at_once and plan.seeds[0].size > 0.0)
PLANS = NEVER, AT_ONCE, LARGE


def never(env: GrowthEnv) -> NeverActor:
    return NeverActor()


@pytest.fixture(scope="module")
def plans() -> Outcome:
    return play_plans(HOSTS, PLANS)


def assert_equal(a: Outcome, b: Outcome) -> None:
    for name in Outcome.__slots__:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)


def test_the_same_hosts_meet_plans_and_policies(plans: Outcome):
    alone = play(HOSTS, never, 1)
    assert (alone.test_utility[:, 0] == plans.test_utility[:, 0]).all()
    assert (alone.test_accuracy[:, 0] == plans.test_accuracy[:, 0]).all()
    assert (alone.features == plans.features).all()
    assert (alone.added == 0).all()
    several = play(HOSTS, never, 3)
    assert (several.test_utility == alone.test_utility).all()
    assert (play(HOSTS, growing, 1).added[:, 0] == plans.added[:, 2]).all()


def test_a_host_depends_on_its_identity_alone():
    all_hosts, later = play(HOSTS, never, 1), replace(HOSTS, first=7, tasks=HOSTS.tasks[2:])
    assert (play(later, never, 1).features == all_hosts.features[2:]).all()
    assert len({row.tobytes() for row in all_hosts.features}) == len(HOSTS.tasks)


def test_batches_do_not_matter(monkeypatch):
    whole = play(HOSTS, growing, 2)
    monkeypatch.setattr(module, "ROWS", 5)
    sizes: list[int] = []
    assert_equal(play(HOSTS, growing, 2, on_batch=sizes.append), whole)
    assert sizes == [4, 4]
    # A host with all its environments is never divided.
    play(HOSTS, growing, 6, on_batch=sizes.append)
    assert sizes[2:] == [6] * 4


def test_the_progress_counts_episodes(plans: Outcome):
    sizes: list[int] = []
    play_plans(HOSTS, PLANS, sizes.append)
    assert sum(sizes) == len(HOSTS.tasks) * len(PLANS)


def test_two_data_orders_share_the_initial_hosts(monkeypatch):
    parameters = []

    class Watched(GrowthEnv):
        def reset(self, episode: int):  # type: ignore[no-untyped-def]
            found = super().reset(episode)
            parameters.append([shard.engine.stack.host.clone() for shard in self.shards])
            return found

    monkeypatch.setattr(module, "GrowthEnv", Watched)
    # The hosts of the tiny population are frozen, so those of another recipe are compared.
    free = tuple(replace(task, host_learning_rate=None) for task in TASKS)
    population = replace(HOSTS, tasks=free)
    first, second = (play(replace(population, data_seed=seed), never, 1) for seed in (1, 2))
    assert all(torch.equal(*pair) for pair in zip(*parameters, strict=True))
    assert (first.features[:, 0] == second.features[:, 0]).all()
    assert (first.features[:, -1] != second.features[:, -1]).any()
    assert (first.test_score != second.test_score).any()


def test_utility_is_score_minus_the_rent_of_the_task(plans: Outcome):
    size = TASKS[0].host.parameter_count
    price = TASKS[0].price * np.log1p(plans.added / size)
    np.testing.assert_allclose(plans.test_utility, plans.test_score - price, atol=1e-6)
    np.testing.assert_allclose(plans.validation_utility, plans.validation_score - price, atol=1e-6)
    slot = TASKS[0].host.slots[-1]
    assert {*plans.added[:, 2]} == {max(slot.layouts[kind].size for kind in slot.kinds)}
    assert (plans.added[:, 1] > 0).all()


def test_members_are_in_the_order_of_the_plans(plans: Outcome):
    other = play_plans(HOSTS, (NEVER, LARGE, AT_ONCE))
    assert (other.added[:, [0, 2, 1]] == plans.added).all()


def test_features_are_those_before_each_step(plans: Outcome):
    steps = plans.features[0, :, HOST_FEATURES.index("progress")]
    np.testing.assert_allclose(steps, np.arange(12) / 12, atol=1e-6)
    accuracy = plans.features[:, 1, HOST_FEATURES.index("expected_accuracy")]
    assert (accuracy > 0.4).tolist() == [True, False] * 2


def test_rules_of_growth_apply():
    def random(env: GrowthEnv) -> RandomActor:
        return RandomActor(3)

    def most_living(rules: Rules, population: Population = HOSTS) -> int:
        most = 0

        class Counting(RandomActor):
            def act(self, observation, step: int):  # type: ignore[no-untyped-def]
                nonlocal most
                most = max(most, int(observation.slots[..., 0].sum(1).max()))
                return super().act(observation, step)

        play(population, lambda env: Counting(3), 8, rules)
        return most

    assert most_living(Rules(one_at_a_time=False)) == len(TASKS[0].host.slots)
    assert most_living(Rules(one_at_a_time=False, max_seeds=1)) == 1
    limited = replace(HOSTS, tasks=tuple(replace(task, max_seeds=1) for task in HOSTS.tasks))
    assert most_living(Rules(one_at_a_time=False), limited) == 1


def test_the_first_plan_must_be_never():
    with pytest.raises(ValueError, match="the first plan must be NEVER"):
        play_plans(HOSTS, (LARGE, NEVER))


def test_features_are_those_of_the_first_middle_and_last_slot_of_hosts_of_any_depth(monkeypatch):
    deep = replace(
        TASKS[1], host=CnnHost((4, 4, 4, 4), 10, (8, 8, 1)), pretraining=None, name="tiny:9"
    )
    shallow = replace(TASKS[0], host=CnnHost((4,), 10, (8, 8, 1)), pretraining=None, name="tiny:8")
    mixed = Population((deep, TASKS[0], shallow))
    found = play_plans(mixed, (NEVER,)).features
    monkeypatch.setattr(module, "ROWS", 1)
    np.testing.assert_allclose(play_plans(mixed, (NEVER,)).features, found, rtol=1e-4, atol=1e-5)
    width, depth = len(SLOT_FEATURES), SLOT_FEATURES.index("depth")
    assert found.shape[2] == len(HOST_FEATURES) + 3 * width
    seen = found[:, 0, len(HOST_FEATURES) :].reshape(3, 3, width)[..., depth]
    np.testing.assert_allclose(seen, [[0.25, 0.75, 1.0], [0.5, 0.5, 1.0], [1.0, 1.0, 1.0]])


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
    digits, partial(digits, shift=1), partial(digits, shift=2), data_of(None),
    data_of(None, sample=1), data_of(Shift("noise", 0.5, 1)), data_of(Shift("noise", 0.5, 2)),
    closure(1), closure(2), lambda: digits(shift=1), lambda: digits(shift=2), Maker(1).data,
    Maker(2).data,
]  # fmt: skip


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


def test_the_last_digits_of_a_number_do_not_change_a_key() -> None:
    assert digest(0.1 + 0.2) == digest(0.3) != digest(0.3 + 1e-9)


def test_threads_do_not_count_and_identities_do():
    assert Population(HOSTS.tasks).threads == 1
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
