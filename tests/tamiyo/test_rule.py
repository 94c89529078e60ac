"""The rule that runs from the command line is a variant of the ladder, of one seed or more."""

import pytest
import torch

from esper.leyline.actions import Op
from esper.runtime.tasks import find
from esper.simic.growth.collect import collect
from esper.tamiyo.try_and_keep import RuleActor
from esper_lab.controls import TRIALS, TURNS, TrialPlan, TurnPlan, trial_actor
from support import small_environments

KEPT = TrialPlan(size=0.0, start=0.0, keep=99, decision=1.0)
TURN = TurnPlan(size=0.0, start=0.0, patience=0.3, order="ends")


@pytest.mark.parametrize(
    ("names", "plans", "plan", "length", "max_seeds"),
    [
        (("digits_shift", "adaptation:3"), TRIALS, KEPT, 14, None),
        (("one_seed:3",), TURNS, TURN, 20, 1),
    ],
    ids=["try and keep", "try in turn, of one seed"],
)
def test_the_rule_acts_as_its_variant(
    names: tuple[str, ...], plans: tuple, plan: object, length: int, max_seeds: int | None
) -> None:
    tasks, members = [find(name) for name in names], len(plans)
    assignment = torch.arange(len(tasks)).repeat_interleave(members)
    settings = {"seed": 3, "group_size": members, "episode_length": length, "threads": 1}
    settings |= {"batch_size": 8, "max_seeds": max_seeds}
    env = small_environments(tasks, len(assignment), assignment=assignment, **settings)
    variants = collect(env, trial_actor(env), 0).actions
    rule = RuleActor(lambda: env.current_slots, length, max_seeds=max_seeds)
    found = collect(env, rule, 0).actions
    rows = plans.index(plan) + members * torch.arange(len(tasks))
    assert torch.equal(found[:, rows], variants[:, rows])
    assert not torch.equal(found, variants), "other variants act otherwise"
    planted = (found[..., 0] == Op.GERMINATE).sum(0)
    assert max_seeds is None or bool((planted >= 1).all())
