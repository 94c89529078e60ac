"""Try in turn on observations whose right decision is known, and on real hosts."""

import torch

from esper.leyline.actions import HEADS, Op
from esper.runtime.tasks import find
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.baselines import blueprint_of
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.try_and_keep import RuleActor
from esper.tamiyo.try_in_turn import TryInTurnActor, Turns, turns_of
from esper.tolaria.precision import Precision
from esper_lab.trials import TURNS, TurnPlan, trial_actor
from rule_observations import SLOTS, observed
from synthetic import CPU

PATIENCE = 4


def at(slot: int, gain: float | None = None) -> list[float | None]:
    """Contributions: that of the seed in ``slot`` alone is known, if it is given."""
    return [gain if other == slot else None for other in range(SLOTS)]


def actor(last: int = 20) -> TryInTurnActor:
    def one(value: int) -> torch.Tensor:
        return torch.tensor([value])

    made = TryInTurnActor(
        Turns(
            torch.tensor([[1, 2, 3]]), torch.tensor([[2, 0, 1]]), one(1), one(PATIENCE), one(last)
        )
    )
    made.begin(torch.arange(1), 0)
    return made


def chosen(made: TryInTurnActor, observation: Observation, step: int) -> tuple[Op, int, int]:
    row = made.act(observation, step)[0][0].tolist()
    return Op(row[0]), row[HEADS.index("slot")], row[HEADS.index("blueprint")]


NOTHING: list[float | None] = [None] * SLOTS
EMPTY = {Op.GERMINATE: [0, 1, 2]}


def test_slots_are_tried_in_order_until_a_seed_pays() -> None:
    made = actor()
    assert chosen(made, observed(EMPTY, NOTHING), 0)[0] is Op.WAIT, "it begins at its start"
    assert chosen(made, observed(EMPTY, NOTHING), 1) == (Op.GERMINATE, 2, 3)
    assert chosen(made, observed({Op.ADVANCE: [2]}, NOTHING), 2)[:2] == (Op.ADVANCE, 2)
    prunable = {Op.PRUNE: [2], Op.FOSSILISE: [2]}
    assert chosen(made, observed(prunable, at(2, -1.0)), 4)[0] is Op.WAIT, "it is too young"
    assert chosen(made, observed(prunable, at(2)), 5)[0] is Op.WAIT, "no contribution is known"
    assert chosen(made, observed(prunable, at(2, -1.0)), 6)[:2] == (Op.PRUNE, 2)
    assert chosen(made, observed({Op.GERMINATE: [1]}, NOTHING), 7)[0] is Op.WAIT, (
        "slot 0 is its next one"
    )
    assert chosen(made, observed(EMPTY, NOTHING), 8) == (Op.GERMINATE, 0, 1)
    keepable = {Op.PRUNE: [0], Op.FOSSILISE: [0]}
    assert chosen(made, observed(keepable, at(0, 1.0)), 12)[:2] == (Op.FOSSILISE, 0)
    assert chosen(made, observed(EMPTY, NOTHING), 13)[0] is Op.WAIT, (
        "nothing follows a seed that pays"
    )


def test_nothing_is_planted_that_could_not_be_measured_nor_after_the_last_slot() -> None:
    late = actor(last=3)
    assert chosen(late, observed(EMPTY, NOTHING), 4)[0] is Op.WAIT
    made, step = actor(last=100), 1
    for slot in (2, 0, 1):
        assert chosen(made, observed(EMPTY, NOTHING), step)[:2] == (Op.GERMINATE, slot)
        step += PATIENCE
        assert chosen(made, observed({Op.PRUNE: [slot]}, at(slot, -1.0)), step)[0] is Op.PRUNE
        step += 1
    assert chosen(made, observed(EMPTY, NOTHING), step)[0] is Op.WAIT


def test_hosts_with_fewer_slots_are_tried_in_theirs() -> None:
    tasks = [find("digits_shift"), find("one_seed:3")]
    slots = [task.host.slots for task in tasks]
    turns = turns_of(slots, 3, 48, size=1.0)
    assert turns.order.tolist() == [[1, 0, -1], [2, 0, 1]]
    first = tasks[0].host.slots[0]
    assert turns.blueprint[0, 0] == blueprint_of(1.0, first)
    assert turns_of(slots, 3, 48, order="forwards").order.tolist() == [[0, 1, -1], [0, 1, 2]]
    assert turns_of(slots, 3, 48, order="backwards").order.tolist() == [[1, 0, -1], [2, 1, 0]]


def test_the_rule_is_a_variant_of_the_ladder_and_keeps_to_one_seed() -> None:
    task, members, length = find("one_seed:3"), len(TURNS), 20
    config = GrowthConfig(
        seed=3,
        group_size=members,
        episode_length=length,
        max_batches=1,
        batch_size=8,
        max_seeds=1,
        threads=1,
    )
    env = GrowthEnv(
        (task,),
        torch.arange(members),
        config,
        Precision("cpu"),
        CPU,
        assigned=torch.zeros(members, dtype=torch.long),
    )
    variant = TURNS.index(TurnPlan(size=0.0, start=0.0, patience=0.3, order="ends"))
    variants = collect(env, trial_actor(env), 0).actions
    rule = RuleActor(lambda: env.current_slots, length, max_seeds=1)
    found = collect(env, rule, 0).actions
    assert torch.equal(found[:, variant], variants[:, variant])
    assert not torch.equal(found, variants), "other variants act otherwise"
    planted = (found[..., 0] == Op.GERMINATE).sum(0)
    assert bool((planted >= 1).all())
