"""The rule that runs from the command line is one of the variants of the ladder."""

import torch

from esper.runtime.tasks import find
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.try_and_keep import RuleActor
from esper.tolaria.precision import Precision
from esper_lab.trials import TRIALS, TrialPlan, trial_actor
from synthetic import CPU

LENGTH = 14


def test_the_rule_acts_as_its_variant_of_try_and_keep() -> None:
    tasks = (find("digits_shift"), find("adaptation:3"))
    members = len(TRIALS)
    config = GrowthConfig(
        seed=3, group_size=members, episode_length=LENGTH, max_batches=1, batch_size=8, threads=1
    )
    assigned = torch.tensor([0, 1]).repeat_interleave(members)
    env = GrowthEnv(
        tasks, torch.arange(2 * members), config, Precision("cpu"), CPU, assigned=assigned
    )
    variant = TRIALS.index(TrialPlan(size=0.0, start=0.0, keep=99, decision=1.0))
    variants = collect(env, trial_actor(env), 0).actions
    found = collect(env, RuleActor(lambda: env.current_slots, LENGTH), 0).actions
    rows = torch.tensor([variant, members + variant])
    assert torch.equal(found[:, rows], variants[:, rows])
    assert not torch.equal(found, variants), "other variants act otherwise"
