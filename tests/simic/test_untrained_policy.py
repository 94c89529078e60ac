"""Behaviour of an untrained policy: PPO can learn only from actions that occur."""

from collections import Counter

import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.leyline.actions import Op
from esper.leyline.config import LearnerConfig
from esper.runtime import data
from esper.runtime.tasks import Task
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tolaria.precision import Precision
from synthetic import CPU


def test_an_untrained_policy_fossilises_a_tenth_of_what_it_germinates() -> None:
    """On a tiny host with shifted digits; every action is legal."""
    host = CnnHost(channels=(3, 4), classes=10, image=(8, 8, 1))
    task = Task("tiny", "shifted digits", host, lambda: data.digits(shift=2, noise=0.1))
    config = GrowthConfig(seed=1, episode_length=40, max_batches=1, batch_size=8)
    env = GrowthEnv([task], torch.arange(64), config, Precision("cpu"), CPU)
    done: Counter = Counter()

    def on_step(t, actions, step) -> None:
        assert bool(step.report.success.all())
        done.update(actions[:, 0].tolist())

    collect(env, growth_agent(LearnerConfig(), 1, CPU), 0, on_step)
    assert done[Op.GERMINATE] >= 20
    assert done[Op.FOSSILISE] >= 0.1 * done[Op.GERMINATE]
    assert done[Op.WAIT] > done[Op.PRUNE]
