"""Try and keep on observations whose right decision is known."""

import torch

from esper.leyline.actions import ALPHA_SPEED_STEPS, HEADS, Op
from esper.leyline.stages import Stage
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.try_and_keep import Trial, TryAndKeepActor, seed_worth
from rule_observations import NOTHING, SLOTS, choice, observed

DECISION = 6


def trial(rows: int, keep: int = 99, start: int = 1) -> Trial:
    def filled(value: int) -> torch.Tensor:
        return torch.full((rows,), value)

    return Trial(
        torch.arange(rows * SLOTS).view(rows, SLOTS) % 4 + 1, filled(start), filled(DECISION),
        filled(keep),
    )  # fmt: skip


def actor(keep: int = 99, start: int = 1) -> TryAndKeepActor:
    made = TryAndKeepActor(trial(1, keep, start))
    made.begin(torch.arange(1), 0)
    return made


def chosen(made: TryAndKeepActor, observation: Observation, step: int) -> tuple[Op, int]:
    return choice(made, observation, step)[:2]


KEEPING = {Op.PRUNE: [0, 1, 2], Op.FOSSILISE: [0, 1, 2]}


def test_every_slot_is_planted_once_from_the_start_until_the_decision():
    made = actor()
    empty = observed({Op.GERMINATE: [0, 1, 2]}, NOTHING)
    found = [chosen(made, empty, step) for step in range(6)]
    assert found[0][0] is Op.WAIT
    assert found[1:4] == [(Op.GERMINATE, s) for s in range(3)]
    assert [op for op, _ in found[4:]] == [Op.WAIT] * 2
    late = actor(start=4)
    assert chosen(late, empty, 3)[0] is Op.WAIT
    assert chosen(late, empty, 4)[0] is Op.GERMINATE
    assert chosen(late, empty, DECISION)[0] is Op.WAIT


def test_a_seed_gets_the_blueprint_of_its_slot():
    made = actor()
    for slot in range(SLOTS):
        *_, blueprint = choice(made, observed({Op.GERMINATE: [slot]}, NOTHING), 2)
        assert blueprint == trial(1).blueprint[0, slot]


def test_seeds_advance_before_others_are_planted_and_nothing_is_kept_before_the_decision():
    both = {Op.ADVANCE: [1], Op.GERMINATE: [0], **KEEPING}
    assert chosen(actor(), observed(both, [0.1, 0.2, -0.1]), 3) == (Op.ADVANCE, 1)
    assert chosen(actor(), observed(KEEPING, [0.1, 0.2, -0.1]), DECISION - 1)[0] is Op.WAIT


def test_the_worst_is_pruned_first_and_at_once():
    observation = observed(KEEPING, [-0.01, 0.2, -0.05])
    assert chosen(actor(), observation, DECISION) == (Op.PRUNE, 2)
    actions, _, _ = actor().act(observation, DECISION)
    assert ALPHA_SPEED_STEPS[int(actions[0, HEADS.index("alpha_speed")])] == 0


def test_what_pays_is_fossilised():
    op, slot = chosen(actor(), observed(KEEPING, [0.1, 0.3, 0.2]), DECISION)
    assert op is Op.FOSSILISE
    assert slot in range(SLOTS)
    assert chosen(actor(), observed({Op.FOSSILISE: [2]}, [None, None, 0.1]), DECISION) == (op, 2)


def test_only_the_best_are_kept():
    observation = observed(KEEPING, [0.1, 0.3, 0.2])
    assert chosen(actor(keep=2), observation, DECISION) == (Op.PRUNE, 0)
    assert chosen(actor(keep=1), observation, DECISION) == (Op.PRUNE, 0)
    remaining = observed({Op.PRUNE: [1, 2], Op.FOSSILISE: [1, 2]}, [None, 0.3, 0.2])
    assert chosen(actor(keep=1), remaining, DECISION + 1) == (Op.PRUNE, 2)
    assert chosen(actor(keep=2), remaining, DECISION + 1)[0] is Op.FOSSILISE


def test_the_price_decides():
    cheap, dear = (
        observed(KEEPING, [0.04] * SLOTS, share=0.5, price=price) for price in (0.02, 0.2)
    )
    assert chosen(actor(), cheap, DECISION)[0] is Op.FOSSILISE
    assert chosen(actor(), dear, DECISION)[0] is Op.PRUNE
    expected = torch.tensor([[0.04 - 0.2 * 0.5] * SLOTS])
    torch.testing.assert_close(seed_worth(dear), expected)


def test_a_seed_of_unknown_contribution_is_neither_pruned_nor_fossilised():
    assert seed_worth(observed({}, NOTHING)).isneginf().all()
    assert chosen(actor(), observed(KEEPING, NOTHING), DECISION)[0] is Op.WAIT


def test_a_fossilised_seed_is_left_alone():
    kept = [Stage.FOSSILISED, Stage.HOLDING, Stage.HOLDING]
    observation = observed(KEEPING, [-0.5, 0.1, -0.1], stages=kept)
    assert chosen(actor(), observation, DECISION) == (Op.PRUNE, 2)


def test_environments_decide_for_themselves():
    made = TryAndKeepActor(trial(2))
    made.begin(torch.arange(2), 0)
    parts = [
        observed(KEEPING, [-0.1, 0.1, 0.1]).tensors(),
        observed({Op.GERMINATE: [2]}, NOTHING).tensors(),
    ]
    both = Observation.from_tensors({k: torch.cat([parts[0][k], parts[1][k]]) for k in parts[0]})
    actions, log_prob, value = made.act(both, DECISION - 1)
    assert actions[:, 0].tolist() == [Op.WAIT, Op.GERMINATE]
    actions, _, _ = made.act(both, DECISION)
    assert actions[:, 0].tolist() == [Op.PRUNE, Op.WAIT]
    assert log_prob.shape == value.shape == (2,)
