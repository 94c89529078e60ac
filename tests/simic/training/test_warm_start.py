"""PPO and IMPALA start from the policy of a run: the same weights, moments and actions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline.config import unflatten
from esper.leyline.config.offline import ImitationConfig
from esper.leyline.errors import UsageError
from esper.simic.offline.offline_run import learn_offline
from esper.simic.records.episodes import read_episodes
from esper.simic.run.checkpoint import load_latest
from esper.simic.tools.grow import GrowingPolicy
from esper.simic.training.setup import build_agent, initial_checkpoint
from esper.simic.training.vectorized import resume_ppo, run_training
from esper.tamiyo.policy import features
from esper.tamiyo.policy_box import cards
from small_runs import SMALL, assert_same
from synthetic import CPU

SETTINGS = SMALL | {"rounds": 1, "record": True, "episode_length": 6}


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """From records of PPO, the run of an imitation."""
    place = str(tmp_path_factory.mktemp("runs"))
    recorded = run_training(unflatten(SETTINGS | {"telemetry_dir": place, "rounds": 3}), "ppo").path
    return learn_offline(
        ImitationConfig(
            records=(str(recorded),), epochs=8, batch_size=4, lstm_hidden=8, learning_rate=0.02,
            held_out=0.0, threads=1, telemetry_dir=place,
        )
    ).path  # fmt: skip


def started(clone: Path, place: Path, policy: str = "ppo", **more: Any) -> Path:
    given = {"telemetry_dir": str(place), "initial_policy": str(clone), "algorithm": policy}
    return run_training(unflatten(SETTINGS | given | more), policy).path


@pytest.mark.parametrize(
    ("policy", "more"), [("ppo", {}), ("impala", {}), ("impala", {"lag": 2, "rounds": 2})]
)
def test_the_first_round_is_acted_by_the_initial_policy(policy, more, clone, tmp_path) -> None:
    """With a lag of 2 so is the second, whose policy is that of before the first update."""
    run = started(clone, tmp_path, policy, **more)
    agent = GrowingPolicy.named(str(clone)).agent(seed=0)
    episodes = read_episodes([run])
    with torch.no_grad():
        found = agent.policy.evaluate_actions(
            agent.moments.normalise(episodes.observation),
            episodes.actions,
            agent.policy.initial_hidden(episodes.count),
        )
    assert torch.allclose(found.log_prob, episodes.log_prob, atol=1e-5)
    if "lag" not in more:
        values = agent.return_moments.restore(found.value)
        assert torch.allclose(values, episodes.values, atol=1e-5)
    cold = run_training(unflatten(SETTINGS | {"telemetry_dir": str(tmp_path)}), "ppo").path
    assert not torch.equal(read_episodes([cold]).log_prob[:, :4], episodes.log_prob[:, :4])


def test_learning_continues_from_there(clone: Path, tmp_path: Path) -> None:
    run = started(clone, tmp_path, rounds=2, learning_rate=1e-4)
    before, after = (load_latest(r).parts for r in (clone, run))
    steps = 2 * 4 * 6
    for name in ("host", "return"):
        counts = [float(parts["moments"][name]["count"]) for parts in (before, after)]
        assert counts[1] - counts[0] == steps
    for name, x in before["policy"].items():
        assert float((after["policy"][name] - x).abs().max()) < 1e-2, name
    assert any(not torch.equal(after["policy"][n], x) for n, x in before["policy"].items())


def test_a_run_can_start_from_ppo_and_is_resumed_without_it(clone: Path, tmp_path: Path) -> None:
    first = started(clone, tmp_path / "first")
    whole = started(first, tmp_path / "whole", rounds=3)
    cut = started(first, tmp_path / "cut", rounds=2)
    first.rename(tmp_path / "elsewhere")
    resume_ppo(cut, {"rounds": 3})
    assert_same(load_latest(cut).parts, load_latest(whole).parts)


def test_an_evaluated_policy_does_not_start_anew(clone: Path, tmp_path: Path) -> None:
    """Its own checkpoint counts, not the policy that it started from."""
    run = started(clone, tmp_path, learning_rate=0.05)
    agent = GrowingPolicy.named(str(run)).agent(seed=0)
    assert_same(dict(agent.policy.state_dict()), load_latest(run).parts["policy"])


def refused(place: Path, **settings: Any) -> str:
    with pytest.raises(UsageError) as error:
        run_training(unflatten(SETTINGS | {"telemetry_dir": str(place / "runs")} | settings), "ppo")
    assert not (place / "runs").exists()
    return str(error.value)


def test_a_boxed_policy_that_observes_an_unknown_feature_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(features, "HOST_FEATURES", ("unheard_of", *features.HOST_FEATURES[1:]))
    own = {"initial_policy": "keep-or-move", "lstm_hidden": 64}
    assert refused(tmp_path, **own) == (
        "initial_policy: the checkpoint's policy observes progress, which this version does not "
        "compute; use the version of Esper that it came with"
    )


def test_a_policy_that_does_not_fit_is_refused_in_one_line(clone: Path, tmp_path: Path) -> None:
    said = refused(tmp_path, initial_policy="nowhere")
    assert said.startswith("initial_policy: ")
    assert "nowhere is not a run directory" in said
    assert "is not a run directory" in refused(tmp_path, initial_policy="null\0byte")
    assert refused(tmp_path, initial_policy=str(clone), lstm_hidden=16) == (
        f"initial_policy: the LSTM of {clone} has width 8, not 16; give --lstm-hidden 8"
    )
    place = {"rounds": 1, "telemetry_dir": str(tmp_path)}
    control = run_training(unflatten(SMALL | place), "never").path
    said = refused(tmp_path, initial_policy=str(control))
    assert said == f"initial_policy: {control} has no checkpoint"
    given = unflatten(SMALL | {"initial_policy": str(clone), "telemetry_dir": str(tmp_path)})
    with pytest.raises(UsageError, match=r"^initial_policy: heuristic does not learn; leave"):
        run_training(given, "heuristic")
    with pytest.raises(UsageError, match=r"^initial_policy: belongs to growing networks"):
        unflatten({"gym": "CartPole-v1", "initial_policy": str(clone)})


def test_learning_starts_from_a_policy_in_the_box_by_its_name(tmp_path: Path) -> None:
    own = cards()["keep-or-move"].path
    initial = initial_checkpoint(unflatten({"initial_policy": own.name, "lstm_hidden": 64}))
    assert initial is not None
    assert_same(initial.parts["policy"], load_latest(own).parts["policy"])
    assert refused(tmp_path, initial_policy=own.name) == (
        f"initial_policy: the LSTM of {own} has width 64, not 8; give --lstm-hidden 64"
    )


def test_a_run_of_a_gymnasium_task_is_refused(clone: Path, tmp_path: Path) -> None:
    run = tmp_path / "gym"
    run.mkdir()
    content = json.loads((clone / "config.json").read_text())
    content["settings"] = {"gym": "CartPole-v1"}
    (run / "config.json").write_text(json.dumps(content))
    said = refused(tmp_path, initial_policy=str(run))
    assert said == f"initial_policy: {run} was trained on CartPole-v1; give a growth run"


def test_an_observation_of_another_version_is_refused(clone: Path) -> None:
    config = unflatten({"initial_policy": str(clone), "lstm_hidden": 8})
    initial = initial_checkpoint(config)
    assert initial is not None
    host = initial.parts["moments"]["host"]
    initial.parts["moments"]["host"] = {name: x[:-1] if x.ndim else x for name, x in host.items()}
    with pytest.raises(UsageError, match=r"^initial_policy: it belongs to another network \("):
        build_agent(config, CPU, initial)
