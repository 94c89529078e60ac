"""The control policies without a network."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.leyline.actions import BLUEPRINTS, CHOICE_HEADS, HEAD_WIDTHS, HEADS, RELEVANT_HEADS, Op
from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.stages import Stage
from esper.simic.training.vectorized import run_training
from esper.tamiyo.baselines import NeverActor, first_applicable
from esper.tamiyo.heuristic import ROTATION, HeuristicActor, HeuristicConfig
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import SLOT_FEATURES, Observation
from esper.tamiyo.random_actor import RandomActor
from synthetic import CPU, everything_legal, only_op, random_observation


def test_the_heuristic_keeps_seeds_that_help(tmp_path: Path) -> None:
    """On a built-in task at full length, most environments keep a seed and gain accuracy."""
    settings = {"envs": 8, "rounds": 1, "telemetry_dir": str(tmp_path)}
    (done,) = run_training(unflatten(settings, TrainConfig()), "heuristic").rounds
    assert done.fossilised >= 0.5
    assert done.gain > 0.0


def test_the_heuristic_prunes_held_seeds_that_do_not_help_and_keeps_those_that_do() -> None:
    observation = everything_legal(random_observation((3,), slots=2, seed=5))
    names = [f"stage_{Stage.HOLDING.name.lower()}", "contribution"]
    held, contribution = (observation.slots[..., SLOT_FEATURES.index(name)] for name in names)
    held[:] = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    contribution[:] = torch.tensor([[-0.5, 0.0], [0.0, 1.0], [-0.5, 0.0]])
    actor = HeuristicActor(40)
    actor.begin(torch.arange(3), 0)
    actions = actor.act(observation, 0)[0]
    assert actions[:, 0].tolist() == [Op.PRUNE, Op.FOSSILISE, Op.ADVANCE]
    assert actions[:, 1].tolist() == [0, 1, 0]


def waiting_for(op: Op, kinds: list[str]) -> Observation:
    """One environment whose host learns no more, where ``op`` and these blueprints are legal."""
    observation = only_op(random_observation((1,), slots=1, seed=5), op)
    observation.masks.kinds[:] = False
    observation.masks.kinds[..., [BLUEPRINTS.index(name) for name in kinds]] = True
    observation.host[:] = 1.0
    return observation


def test_the_heuristic_asks_for_half_a_point_of_contribution() -> None:
    for points, expected in ((0.3, Op.WAIT), (0.7, Op.FOSSILISE)):
        observation = waiting_for(Op.FOSSILISE, [])
        observation.slots[..., SLOT_FEATURES.index("contribution")] = 10.0 * points / 100.0
        actor = HeuristicActor(40)
        actor.begin(torch.arange(1), 0)
        assert actor.act(observation, 0)[0][0, 0] == expected


def test_the_heuristic_skips_a_blueprint_whose_seeds_were_pruned() -> None:
    first, second = ROTATION[:2]
    for penalty, expected in ((0.0, first), (5.9, first), (6.0, second), (8.0, second)):
        actor = HeuristicActor(8, HeuristicConfig(penalty=penalty))
        actor.begin(torch.arange(1), 0)
        for op in (Op.GERMINATE, Op.PRUNE, Op.GERMINATE, Op.GERMINATE):
            observation = waiting_for(op, [first, second])
            observation.blueprints[:] = BLUEPRINTS.index(first)
            observation.slots[..., SLOT_FEATURES.index("contribution")] = -1.0
            action = actor.act(observation, 0)[0][0]
        assert action[0] == Op.GERMINATE
        assert action[HEADS.index("blueprint")] == BLUEPRINTS.index(expected)


def test_the_random_policy_is_uniform_over_legal_options() -> None:
    count = 4_000
    observation = random_observation((count,), slots=3, seed=1)
    legal = torch.zeros(count, len(Op), 3, dtype=torch.bool)
    legal[:, Op.WAIT] = True
    legal[:, Op.GERMINATE, 1:] = True
    legal[:, Op.PRUNE, 0] = True
    kinds = torch.zeros(count, 3, HEAD_WIDTHS["blueprint"], dtype=torch.bool)
    kinds[:, :, [2, 5]] = True
    observation = replace(observation, masks=ActionMasks(legal, kinds))
    actor = RandomActor(seed=3)
    actor.begin(torch.arange(count, device=CPU), episode=0)
    actions, _, _ = actor.act(observation, 0)

    ops = torch.bincount(actions[:, 0], minlength=len(Op)) / count
    for op in Op:
        expected = 1 / 3 if op in (Op.WAIT, Op.GERMINATE, Op.PRUNE) else 0.0
        assert abs(ops[op].item() - expected) < 0.04, op
    grown = actions[actions[:, 0] == Op.GERMINATE]
    assert set(grown[:, 1].tolist()) == {1, 2}
    assert set(grown[:, 2].tolist()) == {2, 5}
    for i, head in enumerate(CHOICE_HEADS):
        if head in RELEVANT_HEADS[Op.GERMINATE] and head != "blueprint":
            assert set(grown[:, 2 + i].tolist()) == set(range(HEAD_WIDTHS[head])), head
    assert set(actions[actions[:, 0] == Op.WAIT][:, 1].tolist()) == {0}


def test_the_random_policy_knows_the_log_prob_of_its_actions() -> None:
    """One over the number of whole actions that could be drawn along the same way."""
    observation = random_observation((200,), slots=3, seed=2)
    actor = RandomActor(seed=3)
    actor.begin(torch.arange(200, device=CPU), episode=0)
    actions, log_prob, value = actor.act(observation, 0)
    legal, kinds = observation.masks.slots.tolist(), observation.masks.kinds.tolist()
    for row, action in enumerate(actions.tolist()):
        op, slot = Op(action[0]), action[1]
        options = {"op": sum(map(any, legal[row])), "slot": sum(legal[row][op])}
        options |= HEAD_WIDTHS | {"blueprint": sum(kinds[row][slot]), "op": options["op"]}
        ways = math.prod(options[head] for head in RELEVANT_HEADS[op])
        assert log_prob[row].item() == pytest.approx(-math.log(ways), abs=1e-6)
    assert len(set(actions[:, 0].tolist())) == len(Op)
    assert not value.any()


def test_the_never_policy_always_waits() -> None:
    observation = random_observation((5,), slots=2, seed=1)
    actions, _, _ = NeverActor().act(observation, 0)
    assert (actions == 0).all()


def test_the_first_operation_that_is_wanted_in_some_slot_is_taken() -> None:
    """Of several slots the first, or where slots are scored the best of those that want it."""
    none, second, both = [False, False], [False, True], [True, True]
    wanted = {
        Op.PRUNE: torch.tensor([none, both, second, none]),
        Op.ADVANCE: torch.tensor([both, both, both, none]),
    }
    op, slot = first_applicable(wanted)
    assert op.tolist() == [Op.ADVANCE, Op.PRUNE, Op.PRUNE, Op.WAIT]
    assert slot.tolist() == [0, 0, 1, 0]
    scores = {Op.PRUNE: torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])}
    same, slot = first_applicable(wanted, scores)
    assert same.tolist() == op.tolist()
    assert slot.tolist() == [0, 1, 1, 0]
