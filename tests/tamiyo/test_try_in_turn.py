"""Try in turn on observations whose right decision is known, and on real hosts."""

import torch

from esper.leyline.actions import Op
from esper.runtime.tasks import find
from esper.tamiyo.baselines import blueprint_of
from esper.tamiyo.try_in_turn import TryInTurnActor, Turns, turns_of
from rule_observations import NOTHING, SLOTS, choice, observed

PATIENCE = 4


def at(slot: int, gain: float | None = None) -> list[float | None]:
    """Contributions: that of the seed in ``slot`` alone is known, if it is given."""
    return [gain if other == slot else None for other in range(SLOTS)]


def actor(last: int = 20) -> TryInTurnActor:
    def one(value: int) -> torch.Tensor:
        return torch.tensor([value])

    blueprint, order = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 0, 1]])
    made = TryInTurnActor(Turns(blueprint, order, one(1), one(PATIENCE), one(last)))
    made.begin(torch.arange(1), 0)
    return made


EMPTY = {Op.GERMINATE: [0, 1, 2]}


def test_slots_are_tried_in_order_until_a_seed_pays() -> None:
    made = actor()
    assert choice(made, observed(EMPTY, NOTHING), 0)[0] is Op.WAIT, "it begins at its start"
    assert choice(made, observed(EMPTY, NOTHING), 1) == (Op.GERMINATE, 2, 3)
    assert choice(made, observed({Op.ADVANCE: [2]}, NOTHING), 2)[:2] == (Op.ADVANCE, 2)
    prunable = {Op.PRUNE: [2], Op.FOSSILISE: [2]}
    assert choice(made, observed(prunable, at(2, -1.0)), 4)[0] is Op.WAIT, "it is too young"
    assert choice(made, observed(prunable, at(2)), 5)[0] is Op.WAIT, "no contribution is known"
    assert choice(made, observed(prunable, at(2, -1.0)), 6)[:2] == (Op.PRUNE, 2)
    assert choice(made, observed({Op.GERMINATE: [1]}, NOTHING), 7)[0] is Op.WAIT, (
        "slot 0 is its next one"
    )
    assert choice(made, observed(EMPTY, NOTHING), 8) == (Op.GERMINATE, 0, 1)
    keepable = {Op.PRUNE: [0], Op.FOSSILISE: [0]}
    assert choice(made, observed(keepable, at(0, 1.0)), 12)[:2] == (Op.FOSSILISE, 0)
    assert choice(made, observed(EMPTY, NOTHING), 13)[0] is Op.WAIT, (
        "nothing follows a seed that pays"
    )


def test_nothing_is_planted_that_could_not_be_measured_nor_after_the_last_slot() -> None:
    late = actor(last=3)
    assert choice(late, observed(EMPTY, NOTHING), 4)[0] is Op.WAIT
    made, step = actor(last=100), 1
    for slot in (2, 0, 1):
        assert choice(made, observed(EMPTY, NOTHING), step)[:2] == (Op.GERMINATE, slot)
        step += PATIENCE
        assert choice(made, observed({Op.PRUNE: [slot]}, at(slot, -1.0)), step)[0] is Op.PRUNE
        step += 1
    assert choice(made, observed(EMPTY, NOTHING), step)[0] is Op.WAIT


def test_hosts_with_fewer_slots_are_tried_in_theirs() -> None:
    tasks = [find("digits_shift"), find("one_seed:3")]
    slots = [task.host.slots for task in tasks]
    turns = turns_of(slots, 3, 48, size=1.0)
    assert turns.order.tolist() == [[1, 0, -1], [2, 0, 1]]
    first = tasks[0].host.slots[0]
    assert turns.blueprint[0, 0] == blueprint_of(1.0, first)
    assert turns_of(slots, 3, 48, order="forwards").order.tolist() == [[0, 1, -1], [0, 1, 2]]
    assert turns_of(slots, 3, 48, order="backwards").order.tolist() == [[1, 0, -1], [2, 1, 0]]
