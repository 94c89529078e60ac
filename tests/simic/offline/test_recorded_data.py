"""The data of offline learning: returns, batches, the split, moments, and what is refused."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline.actions import Op
from esper.leyline.config import unflatten
from esper.leyline.config.offline import ImitationConfig, OfflineConfig
from esper.leyline.errors import UsageError
from esper.leyline.records import record_path
from esper.runtime.gate import Permission
from esper.simic.growth.agent import GrowthMoments
from esper.simic.normalise import RunningMoments
from esper.simic.offline import recorded_data
from esper.simic.offline.batches import (
    EpisodeLoader,
    batch_of,
    epoch_order,
    monte_carlo_returns,
    split,
)
from esper.simic.offline.recorded_data import RecordedData, fit_moments, read_data
from esper.simic.records.episodes import Episodes, read_episodes
from esper.simic.training.vectorized import run_training
from esper.tamiyo.policy.features import SIZE_FEATURES, SLOT_FEATURES
from recorded_episodes import synthetic_episodes
from small_runs import SMALL
from synthetic import CPU

LENGTHS = [6, 3, 5, 6, 2, 4]


# --- returns and batches --------------------------------------------------------------------------


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_returns_are_discounted_sums_of_rewards(discount: float) -> None:
    episodes = synthetic_episodes(LENGTHS)
    returns = monte_carlo_returns(episodes, discount)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            later = [discount ** (i - t) * float(episodes.rewards[i, b]) for i in range(t, length)]
            assert returns[t, b].item() == pytest.approx(sum(later), abs=1e-5)


def test_a_batch_holds_the_chosen_episodes_in_their_order() -> None:
    episodes = synthetic_episodes(LENGTHS)
    returns = monte_carlo_returns(episodes, 1.0)
    batch = batch_of(episodes, returns, torch.tensor([5, 1]))
    assert batch.returns.shape == (4, 2)
    assert torch.equal(batch.returns[:4, 0], returns[:4, 5])
    assert torch.equal(batch.actions[:, 1], episodes.actions[:4, 1])
    assert torch.equal(batch.critic, episodes.observation.critic[:4, [5, 1]])
    assert batch.weight.sum(0).tolist() == [4.0, 3.0]
    assert batch.weight[3].tolist() == [1.0, 0.0]
    assert torch.equal(batch.terminated.nonzero(), torch.tensor([[2, 1], [3, 0]]))


def test_every_episode_is_loaded_once_in_batches_of_nearly_equal_size() -> None:
    episodes = synthetic_episodes(LENGTHS * 4)
    returns = torch.arange(24.0).expand(6, 24)
    loader = EpisodeLoader(episodes, returns, CPU)
    chosen = epoch_order(torch.arange(3, 24), seed=1, epoch=2)
    batches = list(loader.batches(chosen, size=5))
    assert [batch.returns.shape[1] for batch in batches] == [5, 4, 4, 4, 4]
    assert [x for b in batches for x in b.returns[0].tolist()] == chosen.tolist()


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    chosen = torch.tensor([4, 7, 8, 11, 20, 21, 23])
    orders = [epoch_order(chosen, seed, epoch).tolist() for seed in (1, 2) for epoch in (1, 2)]
    assert all(sorted(order) == chosen.tolist() for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(chosen, 1, 2).tolist() == orders[1]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_batches_for_cuda_are_in_page_locked_memory(device: str, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        "esper.simic.offline.batches.DataLoader", lambda data, **options: asked.append(options)
    )
    episodes = synthetic_episodes(LENGTHS)
    EpisodeLoader(episodes, episodes.rewards, torch.device(device)).batches(torch.arange(6), 2)
    assert asked[0]["pin_memory"] == (device != "cpu")


# --- the split ------------------------------------------------------------------------------------


def grouped(runs: int, rounds: int, twins: int, size: int) -> Episodes:
    count = runs * rounds * twins * size
    episodes = synthetic_episodes([2] * count)
    keys = [
        (Path(f"run{run}"), number, twin)
        for run in range(runs)
        for number in range(rounds)
        for twin in range(twins)
        for _ in range(size)
    ]
    return dataclasses.replace(
        episodes, runs=[key[0] for key in keys], rounds=torch.tensor([key[1] for key in keys]),
        twins=torch.tensor([key[2] for key in keys]),
    )  # fmt: skip


def keys_of(episodes: Episodes, chosen: torch.Tensor) -> set[tuple]:
    return {
        (episodes.runs[i], int(episodes.rounds[i]), int(episodes.twins[i])) for i in chosen.tolist()
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.9])
def test_no_host_is_both_learned_from_and_held_out(share: float, seed: int) -> None:
    episodes = grouped(2, 5, 3, 4)
    learned, held_out = split(episodes, share, seed)
    assert sorted([*learned.tolist(), *held_out.tolist()]) == list(range(120))
    assert not keys_of(episodes, learned) & keys_of(episodes, held_out)
    assert len(held_out) == pytest.approx(share * 120, abs=4)


def test_the_seed_decides_what_is_held_out() -> None:
    episodes = grouped(2, 5, 3, 4)
    chosen = {tuple(split(episodes, 0.2, seed)[1].tolist()) for seed in range(5)}
    assert len(chosen) == 5
    assert torch.equal(split(episodes, 0.2, 3)[1], split(episodes, 0.2, 3)[1])


@pytest.mark.parametrize(("groups", "held"), [(2, 1), (1, 0)])
def test_something_is_held_out_and_something_is_left(groups: int, held: int) -> None:
    episodes = grouped(1, 1, groups, 4)
    assert len(keys_of(episodes, split(episodes, 0.01, 0)[1])) == held
    assert len(keys_of(episodes, split(episodes, 0.9, 0)[1])) == held


# --- moments --------------------------------------------------------------------------------------


def test_moments_are_those_of_the_steps_that_are_learned_from(monkeypatch) -> None:
    """Neither of held-out episodes nor of steps and slots that pad the others."""
    monkeypatch.setattr(recorded_data, "_CHUNK", 2)
    episodes = synthetic_episodes(LENGTHS)
    episodes.observation.masks.kinds[:, 1, 2] = False  # episode 1 has two slots
    returns = monte_carlo_returns(episodes, 1.0)
    learned = torch.tensor([0, 1, 2, 5])
    world = unflatten({}).world
    data = RecordedData(episodes, returns, learned, torch.tensor([3, 4]), world, [])
    moments, return_moments = GrowthMoments(CPU), RunningMoments((), CPU)
    fit_moments(data, moments, return_moments)
    steps = [(t, b) for b in learned.tolist() for t in range(LENGTHS[b])]
    host = np.stack([episodes.observation.host[at].numpy() for at in steps])
    slots = np.concatenate(
        [episodes.observation.slots[at][: 2 if at[1] == 1 else 3].numpy() for at in steps]
    )
    values = np.array([returns[at].item() for at in steps])
    for found, rows in ((moments.host, host), (moments.slots, slots), (return_moments, values)):
        assert found.count == len(rows)
        np.testing.assert_allclose(found.mean, rows.mean(0), atol=1e-6)
        np.testing.assert_allclose(found.deviation, np.sqrt(rows.var(0) + 1e-4), atol=1e-6)
    sizes = torch.tensor([name in SIZE_FEATURES for name in SLOT_FEATURES])
    normalised = moments.normalise(episodes.observation).slots
    assert torch.equal(normalised[..., sizes], episodes.observation.slots[..., sizes])


# --- reading --------------------------------------------------------------------------------------

Make = Callable[..., str]


@pytest.fixture(scope="module")
def make(tmp_path_factory) -> Make:
    """Train a small run with records; returns its directory."""
    place = tmp_path_factory.mktemp("runs")

    def run(policy: str = "random", **settings: Any) -> str:
        given = {"telemetry_dir": str(place), "record": True, "rounds": 3}
        return str(run_training(unflatten(SMALL | given | settings), policy).path)

    return run


@pytest.fixture(scope="module")
def random(make: Make) -> str:
    return make()


def copied(run: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_runs_are_joined_with_their_tasks_and_rules(make: Make, random: str) -> None:
    other = make("ppo", task="digits_deep", rounds=2)
    data = read_data(ImitationConfig(records=(random, other), held_out=0.3))
    assert data.episodes.count == 12 + 8
    assert len(data.training) + len(data.held_out) == 20
    assert data.world.task == ("digits_shift", "digits_deep")
    assert data.world.slots == ()
    assert data.world.max_seeds is None
    assert data.steps == 3 * len(data.training)
    assert len(set(data.identities)) == 2


def refusal(**settings: Any) -> str:
    with pytest.raises(UsageError) as error:
        read_data(OfflineConfig(**settings))
    return str(error.value)


def test_runs_with_other_rules_are_refused(make: Make, random: str) -> None:
    for rule in ({"reward": "terminal"}, {"one_at_a_time": False}, {"max_seeds": 1}):
        other = make(rounds=1, **rule)
        (name,) = rule
        assert refusal(records=(random, other)).startswith(f"records: {name} is ")


def test_a_run_is_named_once(random: str, tmp_path: Path) -> None:
    assert "are the same run" in refusal(records=(random, random))
    assert "are the same run" in refusal(records=(random, str(copied(random, tmp_path))))


def test_vtrace_refuses_policies_that_were_certain(make: Make, random: str) -> None:
    heuristic = make("heuristic")
    said = refusal(records=(random, heuristic), method="vtrace")
    assert said == (
        f"method: vtrace needs policies that draw their actions, and {heuristic} has heuristic, "
        "whose actions are deterministic; use --method awr or bc"
    )
    for method in ("awr", "bc"):
        assert read_data(OfflineConfig(records=(random, heuristic), method=method)).held_out.numel()
    assert read_data(OfflineConfig(records=(random,), method="vtrace")).episodes.count == 12


def test_vine_refuses_episodes_of_which_none_can_be_compared(make: Make, random: str) -> None:
    never = make("never")
    said = refusal(records=(never,), method="vine")
    assert said.startswith("method: vine compares episodes that share host and data")
    assert read_data(OfflineConfig(records=(never, random), method="vine")).episodes.count > 12


def test_vine_warns_of_groups_that_differ_before_their_actions_do(
    make: Make, random: str, capsys
) -> None:
    read_data(OfflineConfig(records=(random,), method="vine"))
    assert "without --common-seeds" in capsys.readouterr().err
    read_data(OfflineConfig(records=(random,), method="awr"))
    read_data(OfflineConfig(records=(make("random", common_seeds=True),), method="vine"))
    assert capsys.readouterr().err == ""


def test_the_limit_of_seeds_that_tasks_bring_is_theirs_again(make: Make) -> None:
    """Runs of tasks with and without a limit of their own agree, and the policy has none."""
    limited = make(rounds=1, envs=2, task=["one_seed:3"], episode_length=8)
    free = make(rounds=1, envs=2)
    data = read_data(ImitationConfig(records=(free, limited)))
    assert data.world.max_seeds is None
    assert data.world.task == ("digits_shift", "one_seed"), "a draw stands for its family"


def test_one_host_cannot_be_held_out(make: Make) -> None:
    one = make(rounds=1, envs=2)
    assert refusal(records=(one,)).startswith("held_out: all episodes share host and data")
    assert len(read_data(ImitationConfig(records=(one,), held_out=0.0)).training) == 2


def spoiled(change: Callable[[Episodes], None], monkeypatch) -> None:
    def read(runs: Any, skip_bad: bool = False) -> Episodes:
        episodes = read_episodes(runs, skip_bad)
        change(episodes)
        return episodes

    monkeypatch.setattr(recorded_data, "read_episodes", read)


def prune_illegally(episodes: Episodes) -> None:
    episodes.observation.masks.slots[1, 5, Op.PRUNE] = False
    episodes.actions[1, 5, 0] = Op.PRUNE


NOT_FINITE = "has a number in {} that is not finite"
SPOILT: dict[str, tuple[Callable[[Episodes], Any], str]] = {
    "host": (lambda e: e.observation.host[1, 5, 3].fill_(math.nan), NOT_FINITE),
    "slots": (lambda e: e.observation.slots[1, 5, 0, 3].fill_(math.inf), NOT_FINITE),
    "reward": (lambda e: e.rewards[1, 5].fill_(math.nan), NOT_FINITE),
    "log_prob": (lambda e: e.log_prob[1, 5].fill_(-math.inf), NOT_FINITE),
    "illegal": (prune_illegally, "has an action that was not legal"),
    "cut off": (lambda e: e.terminated[2, 5].fill_(False), "has an episode that was cut off"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_episodes_that_cannot_be_learned_from_are_refused(what, random, monkeypatch) -> None:
    change, message = SPOILT[what]
    spoiled(change, monkeypatch)
    said = message.format(what)
    expected = f"records: round 2 of {random} {said}; remove {random} from --records"
    assert refusal(records=(random,)) == expected


def test_a_damaged_record_is_left_out_only_if_asked(random: str, tmp_path: Path, capsys) -> None:
    run = copied(random, tmp_path)
    path = record_path(run, 2)
    path.write_bytes(path.read_bytes()[:-5])
    assert f"records: {path} is damaged" in refusal(records=(str(run),))
    data = read_data(ImitationConfig(records=(str(run),), skip_bad=True))
    assert data.episodes.count == 8
    assert "skipped 1 of 3 records" in capsys.readouterr().err


def test_the_plugins_of_a_run_are_needed_and_not_executed(random: str, tmp_path: Path) -> None:
    run = copied(random, tmp_path)
    content = json.loads((run / "config.json").read_text())
    content["settings"]["plugin"] = [str(tmp_path / "missing.py")]
    (run / "config.json").write_text(json.dumps(content))
    assert refusal(records=(str(run),)).startswith(f"plugin: {run} names ")
    with pytest.raises(UsageError, match="plugin: cannot read"):
        read_data(ImitationConfig(records=(str(run),)), Permission(trust=True))
