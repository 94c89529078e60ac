"""The diagnosis of a task without a learner."""

import math

import numpy as np
import pytest
import torch

from esper.kasmina.hosts.mlp import MlpHost
from esper.leyline.actions import Op
from esper.leyline.stages import Stage
from esper.runtime import data
from esper.runtime.tasks import Task
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tamiyo.random_actor import RandomActor
from esper.tolaria.precision import Precision
from esper_lab.describe import Diagnosis, SharedStreams, diagnose, signal_to_noise, variance_shares
from synthetic import CPU

TASK = Task(
    "tiny", "digits", MlpHost(widths=(4, 4), classes=10, image=(8, 8, 1)), data.digits,
    episode_length=30, max_batches=1, batch_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(TASK, 3, GrowthConfig(seed=2, group_size=2))


# --- the figures ------------------------------------------------------------------------------


def test_variance_shares_match_a_hand_computed_example() -> None:
    rows = torch.tensor([3.0, -1.0, -2.0], dtype=torch.float64)[:, None]
    columns = torch.tensor([1.0, 0.0, -2.0, 1.0], dtype=torch.float64)
    assert variance_shares(rows.expand(3, 4)) == pytest.approx((1.0, 0.0, 0.0))
    assert variance_shares(columns.expand(3, 4)) == pytest.approx((0.0, 1.0, 0.0))
    # Unbiased variances: 14 / 2 of the rows, 6 / 3 of the columns.
    assert variance_shares(rows + columns) == pytest.approx((7 / 9, 2 / 9, 0.0))
    saddle = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert variance_shares(saddle) == pytest.approx((0.0, 0.0, 1.0))
    assert all(math.isnan(share) for share in variance_shares(torch.ones(3, 4)))


def test_variance_shares_recover_components_and_find_little_in_noise() -> None:
    generator = np.random.default_rng(0)

    def mean_shares(row: float, column: float) -> np.ndarray:
        """Row, column and rest over many tables of 8 x 4 with deviation 1 of the rest."""
        tables = (
            row * generator.normal(size=(500, 8, 1))
            + column * generator.normal(size=(500, 1, 4))
            + generator.normal(size=(500, 8, 4))
        )
        return np.mean([variance_shares(torch.from_numpy(table)) for table in tables], 0)

    assert mean_shares(0.0, 0.0)[2] > 0.88
    row, column, rest = mean_shares(2.0, 0.0)
    assert row == pytest.approx(0.8, abs=0.06)
    assert column < 0.03
    assert row + column + rest == pytest.approx(1.0)


def test_signal_to_noise_is_mean_over_deviation_and_near_zero_for_noise() -> None:
    differences = torch.tensor([[1.0, 3.0], [-1.0, -3.0], [2.0, -2.0], [0.0, 0.0]])
    expected = [(4.0 / 2.0 - 0.5) ** 0.5] * 2 + [0.0, 0.0]
    assert signal_to_noise(differences).tolist() == pytest.approx(expected)
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=(2000, 32)))
    assert signal_to_noise(noise).square().mean() < 0.03


# --- the policies -----------------------------------------------------------------------------


def test_every_policy_acts_as_its_name_says(found: Diagnosis) -> None:
    results = found.results
    assert list(results) == ["never", "random", "heuristic", "everything", "untrained"]
    assert set(results["never"].entries.values()) == {0.0}
    assert results["everything"].entries[Stage.FOSSILISED] == 2.0
    assert results["random"].entries[Stage.GERMINATED] > 0.0
    for policy in results.values():
        assert policy.legal[Op.WAIT] == 1.0
        assert policy.rewards.shape == (30, 6)
        assert all(0.0 <= share <= 1.0 for share in policy.legal.values())
        stages = list(policy.entries.values())
        assert stages == sorted(stages, reverse=True)
    assert results["never"].legal[Op.GERMINATE] == 1.0
    assert results["never"].legal[Op.ADVANCE] == 0.0
    assert results["everything"].legal[Op.GERMINATE] < 0.5
    assert bool((results["never"].rewards.abs() < 1e-6).all())
    assert found.by_init + found.by_actions + found.by_rest == pytest.approx(1.0)


def test_gain_is_measured_on_test_against_the_twin_and_validation_stands_beside_it(
    found: Diagnosis,
) -> None:
    """Recomputed from the engine: the committed hosts, their twins, and the price."""
    config = GrowthConfig(
        seed=2, group_size=2, episode_length=30, max_batches=1, batch_size=8, one_at_a_time=False
    )
    env = GrowthEnv([TASK], torch.arange(6), config, Precision("cpu"), CPU)
    collect(env, ScheduleActor(Schedule.everything(6, TASK.host.slots)), 0)
    (shard,) = env.shards
    everything, never = found.results["everything"], found.results["never"]
    price = 0.05 * torch.log1p(shard._priced_parameters(last=True) / TASK.host.parameter_count)
    assert bool((price > 0.0).all())
    for split, ending in (("test", everything.test), ("validation", everything.validation)):
        scores = shard.engine.committed_scores(shard.state, 29, split)
        assert ending.accuracy.tolist() == pytest.approx(scores.accuracy[:6].tolist())
        assert ending.loss.tolist() == pytest.approx(scores.loss[:6].tolist(), rel=1e-5)
        if split == "test":
            own, twins = scores.expected[:6], scores.expected[6:].repeat_interleave(2)
            assert ending.utility.tolist() == pytest.approx((own - price).tolist(), abs=1e-6)
            assert ending.gain.tolist() == pytest.approx((own - price - twins).tolist(), abs=1e-6)
    assert not torch.equal(everything.test.accuracy, everything.validation.accuracy)
    for ending in (never.test, never.validation):
        assert ending.gain.abs().max() < 1e-6
    # The return of the paired reward is ten times the gain on validation.
    returns = everything.rewards.sum(0) / 10.0
    assert everything.validation.gain.tolist() == pytest.approx(returns.tolist(), abs=1e-5)


def test_shared_streams_draw_the_same_actions_on_every_host() -> None:
    """Only for the first steps: later the legal actions depend on measurements."""
    config = GrowthConfig(seed=2, group_size=2, episode_length=2, max_batches=1, batch_size=8)
    env = GrowthEnv([TASK], torch.arange(6), config, Precision("cpu"), CPU)
    actions = collect(env, SharedStreams(RandomActor(2), 2), 0).actions
    assert torch.equal(actions[:, 0:2], actions[:, 2:4])
    assert torch.equal(actions[:, 0:2], actions[:, 4:6])
    alone = [collect(env, SharedStreams(RandomActor(seed), 2), 0).actions for seed in range(8)]
    assert any(not torch.equal(taken[:, 0], taken[:, 1]) for taken in alone)


@pytest.mark.parametrize(("groups", "size"), [(1, 2), (2, 1)])
def test_a_single_group_or_environment_is_refused(groups: int, size: int) -> None:
    with pytest.raises(ValueError, match="two groups"):
        diagnose(TASK, groups, GrowthConfig(seed=1, group_size=size))
