"""A feature appended to the observation changes nothing for policies that do not know it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.leyline.config import unflatten
from esper.runtime.tasks import find
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.simic.run.checkpoint import load_latest
from esper.simic.tools.grow import GrowingPolicy
from esper.simic.training.vectorized import resume_ppo, run_training
from esper.tamiyo import step_functions
from esper.tamiyo.policy import features
from esper.tolaria.precision import Precision
from small_runs import SMALL, tensors
from synthetic import CPU

SETTINGS = SMALL | {"rounds": 1, "episode_length": 6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    place = str(tmp_path_factory.mktemp("runs"))
    return run_training(unflatten(SETTINGS | {"telemetry_dir": place}), "ppo").path


def append_features(patch: pytest.MonkeyPatch) -> None:
    """A feature of the host, one of the slots and one of the critic, with values of their own."""
    functions = {"host": "HOST_FEATURES", "slot": "SLOT_FEATURES", "critic": "CRITIC_FEATURES"}
    for kind, table in functions.items():
        names, function = getattr(features, table), getattr(features, f"{kind}_features")

        def longer(*given: Any, names=names, function=function, table=table) -> Tensor:
            with pytest.MonkeyPatch.context() as before:
                before.setattr(features, table, names)
                x = function(*given)
            return torch.cat([x, torch.full_like(x[..., :1], 0.5)], -1)

        patch.setattr(features, table, (*names, "novel"))
        patch.setattr(step_functions, f"{kind}_features", longer)


def played(name: str) -> list[Tensor]:
    """Actions, log-probs and values of an episode, and the width of the host's features."""
    policy = GrowingPolicy.named(name)
    config = GrowthConfig(seed=3, group_size=2, episode_length=12, max_batches=1, batch_size=8)
    environment = GrowthEnv([find("digits_shift")], torch.arange(4), config, Precision(CPU), CPU)
    agent = policy.agent(seed=3)
    rollout = collect(environment, agent, 0)
    return [rollout.actions, rollout.log_prob, rollout.values, rollout.observation.host]


@pytest.mark.parametrize("name", ["keep-or-move", None])
def test_a_policy_acts_as_before(name: str | None, trained: Path, monkeypatch) -> None:
    *before, host = played(name or str(trained))
    append_features(monkeypatch)
    *after, longer = played(name or str(trained))
    assert longer.shape[-1] == host.shape[-1] + 1
    assert torch.equal(longer[..., :-1], host)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_learning_continues_as_before_with_the_features_of_the_policy(
    trained: Path, tmp_path: Path, monkeypatch
) -> None:
    given = SETTINGS | {"telemetry_dir": str(tmp_path), "initial_policy": str(trained)}

    def learned() -> tuple[dict[str, Tensor], dict[str, Tensor], features.FeatureNames | None]:
        cut = run_training(unflatten(given | {"name": None}), "ppo").path
        first = tensors(load_latest(cut).parts)
        resume_ppo(cut, {"rounds": 2})
        last = load_latest(cut)
        return first, tensors(last.parts), last.features

    before = learned()
    append_features(monkeypatch)
    after = learned()
    assert before[2] == after[2] != features.FeatureNames.current()
    for one, other in zip(before[:2], after[:2], strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_new_policy_observes_the_new_features(tmp_path: Path, monkeypatch) -> None:
    append_features(monkeypatch)
    run = run_training(unflatten(SETTINGS | {"telemetry_dir": str(tmp_path)}), "ppo").path
    stored = load_latest(run)
    assert stored.features == features.FeatureNames.current()
    assert stored.features is not None
    assert stored.features.host[-1] == "novel"
    assert len(stored.parts["moments"]["host"]["mean"]) == len(features.HOST_FEATURES)
