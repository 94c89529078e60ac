"""Rewards: values, sums over an episode, and independence of environments."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_support import F64, lengths, moment, quick, random_episode, seeds, tensors, total
from torch import Tensor

from esper.leyline.actions import Op
from esper.leyline.stages import Stage
from esper.runtime.tasks import find
from esper.simic.growth import shard
from esper.simic.growth.rewards import (
    REWARD_MODES,
    REWARDS,
    RewardInputs,
    alpha_shock,
    attribution,
    fossil_bonus,
    stage_potential,
    stage_shaping,
)
from esper.tamiyo.policy.features import utility
from oracles.rewards import ORACLES, shaping

slot_counts = st.integers(1, 5)
every_mode = pytest.mark.parametrize("mode", REWARD_MODES)


def f64(value: float) -> Tensor:
    return torch.tensor(value, dtype=F64)


# --- values -----------------------------------------------------------------------------------


def test_every_reward_mode_has_an_oracle() -> None:
    assert tuple(ORACLES) == REWARD_MODES


def assert_equal_to_the_oracle(episode: list[RewardInputs]) -> None:
    """Beside a small host rents and shocks reach their caps; in a long episode seeds that are
    fossilised have been held for part of ``HOLDING_STEPS``."""
    extreme = [replace(inputs, host_parameters=1, episode_length=900) for inputs in episode]
    for inputs in episode + extreme:
        rows = [moment(inputs, row) for row in range(len(inputs.op))]
        for mode, oracle in ORACLES.items():
            expected = torch.tensor([oracle(m) for m in rows], dtype=F64)
            torch.testing.assert_close(
                REWARDS[mode](inputs), expected, rtol=0.0, atol=1e-9, msg=mode
            )
        expected = torch.tensor([shaping(m) for m in rows], dtype=F64)
        torch.testing.assert_close(stage_shaping(inputs), expected, rtol=0.0, atol=1e-9)


@quick
@given(seeds, lengths, slot_counts)
def test_every_mode_equals_the_oracle(seed, length, slots) -> None:
    assert_equal_to_the_oracle(random_episode(seed, length, slots=slots))


def test_every_mode_equals_the_oracle_over_the_whole_lifecycle() -> None:
    """Few of the episodes above hold a fossilisation, or a seed that was pruned long ago."""
    for seed in range(3):
        assert_equal_to_the_oracle(random_episode(seed, 60, count=20))


def test_the_random_episodes_cover_the_whole_lifecycle() -> None:
    episodes = [random_episode(seed, 60, count=20) for seed in range(3)]
    steps = [inputs for episode in episodes for inputs in episode]
    assert {int(op) for inputs in steps for op in inputs.op} == set(Op)
    stages = {int(stage) for inputs in steps for stage in inputs.after.stage.flatten()}
    assert stages == set(Stage)
    last = torch.cat([e[-1].after.stage for e in episodes])
    assert (last == Stage.FOSSILISED).any(1).float().mean() > 0.3


@given(st.floats(0.0, 1.0), st.integers(0, 10**7), st.integers(1, 10**7), st.floats(0.0, 1.0))
def test_utility_is_the_score_minus_the_price(score, added, host, price) -> None:
    expected = score - price * math.log(1.0 + added / host)
    assert utility(f64(score), torch.tensor(added), host, price).item() == pytest.approx(expected)


def test_doubling_a_host_costs_three_and_a_half_points() -> None:
    price = find("digits_shift").price
    worth = [utility(f64(0.6), torch.tensor(added), 500, price) for added in (0, 500)]
    cost = worth[0] - worth[1]
    assert cost.item() == pytest.approx(0.05 * math.log(2.0))
    assert cost.item() == pytest.approx(0.0347, abs=1e-4)


@quick
@given(seeds, lengths, slot_counts)
def test_every_mode_stays_within_its_stated_bounds(seed, length, slots) -> None:
    for inputs in random_episode(seed, length, slots=slots):
        price = 0.1 * inputs.added_parameters / 500_000
        grown = (1.0 + inputs.added_parameters / inputs.host_parameters).log()
        gain = 1.0 + inputs.price * grown  # the lower bounds of u and v
        shaped = 2.4 * slots
        bounds = {
            "terminal": (-10.0 * gain, 10.0),
            "paired": (-10.0 * gain - 10.0 * (1.0 + inputs.previous_gain), 20.0 * gain + 20.0),
            "utility": (-10.0 * gain / length, 10.0 / length),
            "shaped": (-(103.0 * slots + 15.0), 103.0 * slots + 17.0),
            "simplified": (-(shaped + 0.01), 4.4 * slots + 3.0),
            "basic": (-(shaped + 5.5 + price), shaped + 55.3),
            "sparse": (-1.0, 1.0),
        }
        for mode, (low, high) in bounds.items():
            reward = REWARDS[mode](inputs)
            assert reward.isfinite().all(), mode
            assert ((reward >= low) & (reward <= high)).all(), mode
        assert (stage_shaping(inputs).abs() <= shaped).all()


# --- sums over an episode ---------------------------------------------------------------------


@quick
@given(seeds, lengths)
def test_paired_sums_to_terminal_minus_the_twin(seed, length) -> None:
    episode = random_episode(seed, length)
    twin = 10.0 * episode[-1].twin_score
    expected = total("terminal", episode) - twin
    torch.testing.assert_close(total("paired", episode), expected, rtol=0.0, atol=1e-9)


@quick
@given(seeds, lengths)
def test_terminal_sums_to_the_final_utility(seed, length) -> None:
    episode = random_episode(seed, length)
    end = episode[-1]
    worth = utility(end.score, end.added_parameters, end.host_parameters, end.price)
    assert torch.equal(total("terminal", episode), 10.0 * worth)


@quick
@given(seeds, lengths)
def test_utility_reward_sums_to_ten_times_the_mean_utility(seed, length) -> None:
    episode = random_episode(seed, length)
    worth = [utility(i.score, i.added_parameters, i.host_parameters, i.price) for i in episode]
    expected = 10.0 * torch.stack(worth).mean(0)
    torch.testing.assert_close(total("utility", episode), expected, rtol=0.0, atol=1e-9)


@quick
@given(seeds, lengths, slot_counts)
def test_stage_shaping_sums_to_zero_whatever_the_actions(seed, length, slots) -> None:
    shapings = [stage_shaping(i) for i in random_episode(seed, length, slots=slots)]
    torch.testing.assert_close(
        torch.stack(shapings).sum(0), torch.zeros(6, dtype=F64), rtol=0.0, atol=1e-12
    )


@quick
@given(seeds, lengths)
def test_the_potential_before_a_step_equals_that_after_the_previous_step(seed, length) -> None:
    episode = random_episode(seed, length)
    assert not stage_potential(episode[0], "before").any()
    assert not stage_potential(episode[-1], "after").any()
    for earlier, later in pairwise(episode):
        before = stage_potential(later, "before")
        assert torch.equal(stage_potential(earlier, "after"), before)


@quick
@given(seeds, lengths)
def test_terminal_and_sparse_pay_nothing_before_the_end(seed, length) -> None:
    for inputs in random_episode(seed, length)[:-1]:
        assert not REWARDS["terminal"](inputs).any()
        assert not REWARDS["sparse"](inputs).any()


# --- independence of environments -------------------------------------------------------------


@quick
@given(seeds, st.integers(1, 12), slot_counts, st.sampled_from([torch.float32, F64]))
def test_rewards_do_not_depend_on_the_other_environments(seed, length, slots, dtype) -> None:
    for inputs in random_episode(seed, length, count=37, slots=slots):
        inputs = tensors(inputs, lambda x: x.to(dtype) if x.dtype == F64 else x)
        order = torch.randperm(37, generator=torch.Generator().manual_seed(seed))
        permuted = tensors(inputs, lambda x, order=order: x[order])
        for mode, reward in REWARDS.items():
            together = reward(inputs)
            assert together.dtype == dtype
            assert together.shape == (37,)
            assert torch.equal(reward(permuted), together[order]), mode
            for some in (slice(0, 1), slice(36, 37), slice(4, 11), slice(13, 32)):
                apart = reward(tensors(inputs, lambda x, some=some: x[some]))
                assert torch.equal(apart, together[some]), mode


@pytest.mark.parametrize("part", [attribution, alpha_shock, fossil_bonus, stage_shaping])
def test_the_terms_of_shaped_round_the_same_at_any_position(part) -> None:
    def single(x: Tensor) -> Tensor:
        return x.float() if x.dtype == F64 else x

    for inputs in random_episode(1, 15, count=301, slots=2):
        inputs = tensors(inputs, single)
        together = part(inputs)
        for start in range(0, 294, 7):
            some = slice(start, start + 7)
            assert torch.equal(part(tensors(inputs, lambda x, some=some: x[some])), together[some])


@quick
@given(seeds, st.integers(1, 30))
def test_a_nan_stays_in_its_environment(seed, length) -> None:
    ill = torch.arange(6) == 2
    for inputs in random_episode(seed, length):

        def poison(x: Tensor) -> Tensor:
            where = ill.view(-1, *[1] * (x.dim() - 1))
            return x.masked_fill(where, math.nan) if x.is_floating_point() else x

        poisoned = tensors(inputs, poison)
        for mode, reward in REWARDS.items():
            assert torch.equal(reward(poisoned)[~ill], reward(inputs)[~ill]), mode


def test_shaping_is_added_to_the_reward_and_a_roll_back_costs(monkeypatch) -> None:
    monkeypatch.setitem(shard.REWARDS, "paired", lambda inputs: torch.tensor([1.0, 1.0]))
    monkeypatch.setattr(shard, "stage_shaping", lambda inputs: torch.tensor([0.5, -0.5]))
    for weight, expected in ((0.2, [1.1, -2.1]), (0.0, [1.0, -2.0])):
        config = SimpleNamespace(reward="paired", stage_shaping=weight, rollback_penalty=3.0)
        one, inputs = cast(Any, SimpleNamespace(config=config)), cast(Any, None)
        reward = shard.Shard._reward(one, inputs, torch.tensor([0.0, 1.0]))
        torch.testing.assert_close(reward, torch.tensor(expected))


@every_mode
def test_a_nan_on_the_last_step_is_not_hidden(mode) -> None:
    end = random_episode(0, 5)[-1]
    broken = torch.full_like(end.score, math.nan)
    assert REWARDS[mode](replace(end, accuracy=broken, score=broken, loss=broken)).isnan().all()


@quick
@given(seeds, st.integers(1, 30))
def test_a_contribution_that_was_not_measured_never_reaches_the_reward(seed, length) -> None:
    for inputs in random_episode(seed, length):
        unmeasured = torch.full_like(inputs.contribution, math.nan)
        for mode, reward in REWARDS.items():
            assert reward(replace(inputs, contribution=unmeasured)).isfinite().all(), mode


@every_mode
def test_the_slot_of_an_illegal_action_is_not_read(mode) -> None:
    for inputs in random_episode(3, 20):
        waits = inputs.op == Op.WAIT
        elsewhere = torch.where(waits, 1 << 40, inputs.slot)
        changed = REWARDS[mode](replace(inputs, slot=elsewhere))
        assert torch.equal(changed, REWARDS[mode](inputs))
