"""The library of plans and their schedules on different hosts."""

import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime.data import digits
from esper.runtime.tasks import Task, find
from esper.tamiyo.baselines import blueprint_of
from esper.tamiyo.fixed_schedule import NEVER as NO_START
from esper_lab.plans import NEVER, SIZES, STARTS, Plan, PlannedSeed, library, schedule


def task(channels: tuple[int, ...] = (3, 4, 5), length: int = 20) -> Task:
    return Task("mine", "mine", CnnHost(channels, 10, (8, 8, 1)), digits, episode_length=length)


def plans_of_study(draws: int) -> tuple[Plan, ...]:
    """The library and random plans, as in the studies."""
    from populations import random_plans

    return (*library(), *random_plans(draws))


def test_the_library_begins_with_never_and_its_plans_differ(scripts_on_path):
    plans = plans_of_study(30)
    assert plans[0] is NEVER
    assert (NEVER.seeds, NEVER.start) == ((), 1.0)
    assert len({plan.name for plan in plans}) == len(plans)
    assert len({(plan.seeds, plan.at_once) for plan in plans[: len(library())]}) == len(library())
    assert plans_of_study(3) == plans[: len(library()) + 3]


def test_plans_of_one_kind_differ_in_their_start_alone():
    kinds: dict[str, list[Plan]] = {}
    for plan in library():
        kinds.setdefault(plan.kind, []).append(plan)
    singles = [same for same in kinds.values() if len(same[0].seeds) == 1]
    assert len(singles) == 3 * len(SIZES)
    for same in singles:
        assert [plan.start for plan in same] == list(STARTS)
        assert len({(plan.seeds[0].position, plan.seeds[0].size) for plan in same}) == 1
    assert [len(same) for same in kinds.values() if same[0].at_once] == [2, 2]


def test_a_schedule_places_each_seed_by_its_parts():
    plan = Plan("mine", (PlannedSeed(0.0, 0.0, 0.25, 2, 1), PlannedSeed(1.0, 1.0, 0.5)))
    host = task().host
    rows = schedule((NEVER, plan), task())
    assert rows.start.tolist() == [[NO_START] * 3, [5, NO_START, 10]]
    assert rows.style[1, 0] == 2
    assert rows.tempo[1, 0] == 1
    smallest = min(host.slots[0].kinds, key=lambda kind: host.slots[0].layouts[kind].size)
    largest = max(host.slots[2].kinds, key=lambda kind: host.slots[2].layouts[kind].size)
    sizes = [host.slots[0].layouts[int(rows.blueprint[1, 0])].size]
    sizes += [host.slots[2].layouts[int(rows.blueprint[1, 2])].size]
    assert sizes == [host.slots[0].layouts[smallest].size, host.slots[2].layouts[largest].size]


def test_of_two_seeds_in_one_slot_the_later_counts():
    plan = Plan("mine", (PlannedSeed(0.0, 0.0, 0.0), PlannedSeed(0.2, 1.0, 0.5)))
    rows = schedule((plan,), task((3, 4)))
    assert rows.start.tolist() == [[10, NO_START]]
    assert int(rows.blueprint[0, 0]) == blueprint_of(1.0, task((3, 4)).host.slots[0])


def test_every_plan_fits_every_host(scripts_on_path):
    plans = plans_of_study(20)
    for name in ("digits", "digits_deep", "digits_mlp", "text_gpt", "adaptation:3", "cifar_scale"):
        found = find(name)
        rows = schedule(plans, found)
        assert rows.start.shape == (len(plans), len(found.host.slots))
        for s, slot in enumerate(found.host.slots):
            planned = rows.start[:, s] < NO_START
            assert {*rows.blueprint[planned, s].tolist()} <= {*slot.kinds}
        first = torch.tensor([round(plan.start * found.episode_length) for plan in plans])
        grows = rows.start.min(1).values < NO_START
        assert (rows.start.min(1).values[grows] >= first[grows]).all()


def test_sizes_grow_with_the_parameters():
    slot = task().host.slots[1]
    sizes = [slot.layouts[blueprint_of(part / 10, slot)].size for part in range(11)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == tuple(
        pick(slot.layouts[kind].size for kind in slot.kinds) for pick in (min, max)
    )
