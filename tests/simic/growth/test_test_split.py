"""The test split is measured once per episode: after the last step, and never in between.

A score that was measured more often could be chosen by, and would no longer be a test score.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.runtime.tasks import find
from esper.simic.growth.collect import collect
from esper.simic.growth.step import Step
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine
from esper_lab.play import play
from small_runs import SMALL
from support import needs_native, small_environments
from tiny_population import growing, hosts

LENGTH = 14
BACKENDS = ("torch", pytest.param("native", marks=needs_native))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The steps in which the test split is measured, also by a way around ``committed_scores``."""
    steps: list[int] = []
    reads: list[str] = []
    scores, held_back = Engine.committed_scores, DataBank.held_back

    def counted(self, state, step, split, *rest):  # type: ignore[no-untyped-def]
        if split == "test":
            steps.append(step)
        return scores(self, state, step, split, *rest)

    def read(self, split, dataset):  # type: ignore[no-untyped-def]
        reads.append(split)
        return held_back(self, split, dataset)

    monkeypatch.setattr(Engine, "committed_scores", counted)
    monkeypatch.setattr(DataBank, "held_back", read)
    yield steps
    assert reads.count("validation") > len(steps)
    assert reads.count("test") == len(steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_episode_measures_it_once_after_the_last_step(
    measured: list[int], backend: str
) -> None:
    """Hosts of two shapes are two tensor programs, and each measures its own hosts."""
    tasks = [
        replace(find(name), episode_length=LENGTH, max_batches=1, batch_size=8)
        for name in ("digits_shift", "digits_mlp")
    ]
    config = {"seed": 1, "episode_length": LENGTH, "batch_size": 8, "backend": backend}
    assignment = torch.tensor([0, 0, 1, 1])
    env = small_environments(tasks, 4, assignment=assignment, one_at_a_time=False, **config)
    for episode in range(2):
        slots = [task.host.slots for task in tasks]
        plans = [Schedule.everything(2, own) for own in slots]
        found: list[Step] = []
        collect(
            env, ScheduleActor(Schedule.concatenate(plans)), episode,
            lambda t, actions, step, found=found: found.append(step),
        )  # fmt: skip
        assert len(env.shards) == 2
        assert measured == [LENGTH - 1] * 2 * (episode + 1)
        # Something grew, so there were scores that one could have been tempted to look at.
        assert bool((found[-1].report.added_parameters > 0).any())
        assert [step.report.test is None for step in found] == [True] * (LENGTH - 1) + [False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_measures_it_once_per_round(
    measured: list[int], backend: str, tmp_path: Path
) -> None:
    settings = SMALL | {"backend": backend, "rounds": 3, "telemetry_dir": str(tmp_path)}
    train_ppo_vectorized(**settings)
    assert measured == [SMALL["episode_length"] - 1] * 3


def test_an_evaluation_measures_it_once_per_batch_of_hosts(measured: list[int]) -> None:
    population = hosts(4)
    play(population, growing, members=2)
    assert measured == [population.tasks[0].episode_length - 1]
