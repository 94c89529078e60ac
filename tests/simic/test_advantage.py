"""Advantages against arithmetic done by hand, and their limits."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from esper.simic.advantage import GeneralisedEstimator, explained_variance, generalised_advantages
from esper.simic.growth.group_baseline import leave_one_out


def f64(value) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def no_end(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


@pytest.fixture
def episode() -> tuple[Tensor, Tensor, Tensor]:
    """Rewards and values ``[T, N]``, last value ``[N]``."""
    torch.manual_seed(3)
    draw = torch.randn(2, 9, 4, dtype=torch.float64)
    return draw[0], draw[1], torch.randn(4, dtype=torch.float64)


def test_advantages_match_a_hand_computed_example() -> None:
    """gamma 0.9, lambda 0.5, so gamma lambda = 0.45; rewards 1, 0, 2; values 0.5, 1, -1; then 3.

    Continuing after the last step:
        delta_2 = 2 + 0.9 * 3 - (-1)   =  5.7      A_2 =  5.7
        delta_1 = 0 + 0.9 * (-1) - 1   = -1.9      A_1 = -1.9 + 0.45 * 5.7   = 0.665
        delta_0 = 1 + 0.9 * 1 - 0.5    =  1.4      A_0 =  1.4 + 0.45 * 0.665 = 1.69925
    Terminated after the last step:
        delta_2 = 2 - (-1)             =  3        A_2 =  3
                                                   A_1 = -1.9 + 0.45 * 3     = -0.55
                                                   A_0 =  1.4 + 0.45 * -0.55 =  1.1525
    """
    rewards, values = (
        f64([[1.0] * 2, [0.0] * 2, [2.0] * 2]),
        f64([[0.5] * 2, [1.0] * 2, [-1.0] * 2]),
    )
    terminated = torch.tensor([[False, False], [False, False], [False, True]])
    advantages, returns = generalised_advantages(
        rewards, values, f64([3.0, 3.0]), terminated, 0.9, 0.5
    )
    torch.testing.assert_close(advantages[:, 0], f64([1.69925, 0.665, 5.7]))
    torch.testing.assert_close(advantages[:, 1], f64([1.1525, -0.55, 3.0]))
    torch.testing.assert_close(returns, advantages + values)


def test_estimates_are_generalised_advantages_beside_monte_carlo_returns(episode) -> None:
    rewards, values, last = episode
    ends = torch.zeros(2, 9, 4, dtype=torch.bool)
    ends[0, 3, 1] = ends[1, 5, 2] = True
    rollout = SimpleNamespace(
        rewards=rewards, values=values, last_value=last, terminated=ends[0], cut_off=ends[1],
        log_prob=None, with_cut_offs=lambda x, y: (x, y),
    )  # fmt: skip
    moments = SimpleNamespace(restore=lambda x: 2.0 * x)
    estimates = GeneralisedEstimator(0.9, 0.5).estimate(rollout, None, None, moments)
    inputs = rewards, 2.0 * values, 2.0 * last, ends[0], 0.9
    advantages, targets = generalised_advantages(*inputs, 0.5, ends[1])
    torch.testing.assert_close(estimates.advantages, advantages, rtol=0, atol=0)
    torch.testing.assert_close(estimates.targets, targets, rtol=0, atol=0)
    _, returns = generalised_advantages(*inputs, 1.0, ends[1])
    torch.testing.assert_close(estimates.returns, returns, rtol=0, atol=0)


def test_with_lambda_one_returns_are_monte_carlo(episode) -> None:
    rewards, values, last = episode
    advantages, returns = generalised_advantages(rewards, values, last, no_end(rewards), 0.9, 1.0)
    following = last
    for t in reversed(range(len(rewards))):
        following = rewards[t] + 0.9 * following
        torch.testing.assert_close(returns[t], following)
        torch.testing.assert_close(advantages[t], following - values[t])


def test_with_lambda_zero_advantages_are_one_step_errors(episode) -> None:
    rewards, values, last = episode
    advantages, _ = generalised_advantages(rewards, values, last, no_end(rewards), 0.9, 0.0)
    following = torch.cat([values[1:], last[None]])
    torch.testing.assert_close(advantages, rewards + 0.9 * following - values)


def test_a_truncated_episode_matches_a_hand_computed_example() -> None:
    """The first example again, truncated after its first step; the second step only resets.

    V of the state in which it was truncated is that of the second step, 1:
        A_0 = 1 + 0.9 * 1 - 0.5 = 1.4, independent of later steps.
    Truncated after the last step of the rollout, V is the last value, 3:
        A_2 = 2 + 0.9 * 3 + 1 = 5.7
    """
    rewards, values = f64([[1.0], [0.0], [2.0]]), f64([[0.5], [1.0], [-1.0]])
    truncated = torch.tensor([[True], [False], [True]])
    advantages, _ = generalised_advantages(
        rewards, values, f64([3.0]), no_end(rewards), 0.9, 0.5, truncated
    )
    torch.testing.assert_close(advantages[[0, 2], 0], f64([1.4, 5.7]))


def test_advantages_of_constant_rewards_are_geometric_sums() -> None:
    """Reward 1, V = 0 everywhere: A_t = sum over k of (gamma lambda)^k, to the end of the episode.

    With the exact V = 1 / (1 - gamma), every advantage is 0, wherever episodes are truncated.
    """
    gamma, decay, length = 0.9, 0.7, 12
    rewards = torch.ones(length, 1, dtype=torch.float64)
    nothing = torch.zeros_like(rewards)
    advantages, _ = generalised_advantages(
        rewards, nothing, f64([0.0]), no_end(rewards), gamma, decay
    )
    left = torch.arange(length, 0, -1, dtype=torch.float64)
    expected = (1.0 - (gamma * decay) ** left) / (1.0 - gamma * decay)
    torch.testing.assert_close(advantages[:, 0], expected)
    exact = torch.full_like(rewards, 1.0 / (1.0 - gamma))
    truncated = (torch.arange(length) % 5 == 3)[:, None]
    advantages, returns = generalised_advantages(
        rewards, exact, exact[0], no_end(rewards), gamma, decay, truncated
    )
    torch.testing.assert_close(advantages, nothing)
    torch.testing.assert_close(returns, exact)


def ended_at_random(like: Tensor) -> tuple[Tensor, Tensor]:
    """Terminated and truncated steps, never both."""
    draw = torch.rand(like.shape, generator=torch.Generator().manual_seed(8))
    return draw < 0.2, draw > 0.8


def test_advantages_equal_a_linear_filter_over_each_episode() -> None:
    """The discounted sum of errors is the output of scipy's filter, run backwards in time."""
    signal = pytest.importorskip("scipy.signal")
    torch.manual_seed(3)
    rewards, values = torch.randn(2, 40, 6, dtype=torch.float64)
    last = torch.randn(6, dtype=torch.float64)
    terminated, truncated = ended_at_random(rewards)
    found, _ = generalised_advantages(rewards, values, last, terminated, 0.97, 0.9, truncated)
    for n in range(6):
        begin = 0
        ends = (terminated | truncated)[:, n].nonzero()[:, 0].tolist()
        for end in (*ends, 39):
            rows = slice(begin, end + 1)
            following = torch.cat([values[:, n], last[n : n + 1]])[begin + 1 : end + 2].clone()
            if bool(terminated[end, n]):
                following[-1] = 0.0
            errors = rewards[rows, n] + 0.97 * following - values[rows, n]
            if len(errors):
                swept = signal.lfilter([1.0], [1.0, -0.97 * 0.9], errors.numpy()[::-1])[::-1]
                torch.testing.assert_close(found[rows, n], torch.from_numpy(swept.copy()))
            begin = end + 1


def test_advantages_equal_those_of_stable_baselines3() -> None:
    """Stable-Baselines3 adds ``gamma V(final)`` to the reward of a truncated step and calls it the
    end of the episode."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    from gymnasium import spaces

    torch.manual_seed(4)
    rewards, values = torch.randn(2, 30, 5, dtype=torch.float64)
    last = torch.randn(5, dtype=torch.float64)
    terminated, truncated = ended_at_random(rewards)
    found, returns = generalised_advantages(
        rewards, values, last, terminated, 0.98, 0.85, truncated
    )
    box = spaces.Box(-1, 1, (1,))
    buffer = buffers.RolloutBuffer(30, box, box, "cpu", gae_lambda=0.85, gamma=0.98, n_envs=5)
    buffer.reset()
    over = terminated | truncated
    following = torch.cat([values[1:], last[None]])
    buffer.rewards[:] = (rewards + 0.98 * following * truncated).numpy()
    buffer.values[:] = values.numpy()
    buffer.episode_starts[1:] = over[:-1].numpy()
    buffer.compute_returns_and_advantage(last.float(), over[-1].numpy())
    torch.testing.assert_close(found.float(), torch.from_numpy(buffer.advantages))
    torch.testing.assert_close(returns.float(), torch.from_numpy(buffer.returns))


def test_advantages_ignore_what_follows_a_terminated_step(episode) -> None:
    rewards, values, last = episode
    terminated = no_end(rewards)
    terminated[4, :2] = True
    one, _ = generalised_advantages(rewards, values, last, terminated, 0.9, 0.8)
    other_rewards, other_values = rewards.clone(), values.clone()
    other_rewards[5:], other_values[5:] = 7.0, -7.0
    two, _ = generalised_advantages(other_rewards, other_values, last, terminated, 0.9, 0.8)
    assert torch.equal(one[:5, :2], two[:5, :2])
    assert bool((one[:5, 2:] != two[:5, 2:]).all())
    torch.testing.assert_close(one[4, :2], (rewards - values)[4, :2])


def test_the_last_value_counts_only_for_episodes_that_continue(episode) -> None:
    rewards, values, last = episode
    terminated = no_end(rewards)
    terminated[-1, 0] = True
    one, _ = generalised_advantages(rewards, values, last, terminated, 0.9, 0.8)
    two, _ = generalised_advantages(rewards, values, last + 1.0, terminated, 0.9, 0.8)
    assert torch.equal(one[:, 0], two[:, 0])
    torch.testing.assert_close(two[-1, 1:], one[-1, 1:] + 0.9)


def test_advantages_of_environments_are_independent(episode) -> None:
    rewards, values, last = episode
    everyone, _ = generalised_advantages(rewards, values, last, no_end(rewards), 0.9, 0.8)
    for n in range(4):
        alone, _ = generalised_advantages(
            rewards[:, [n]], values[:, [n]], last[[n]], no_end(rewards[:, [n]]), 0.9, 0.8
        )
        assert torch.equal(alone[:, 0], everyone[:, n])


def test_a_perfect_critic_explains_everything() -> None:
    returns = torch.randn(20, 8, dtype=torch.float64)
    overall, within = explained_variance(returns, returns)
    assert (overall.item(), within.item()) == (1.0, 1.0)


def test_a_constant_critic_explains_nothing() -> None:
    returns = 3.0 + torch.randn(20, 8, dtype=torch.float64)
    overall, within = explained_variance(torch.full_like(returns, 50.0), returns)
    assert overall.item() == pytest.approx(0.0, abs=1e-9)
    assert within.item() == pytest.approx(0.0, abs=1e-9)


def test_a_critic_that_knows_only_the_time_explains_nothing_within_a_step() -> None:
    """Returns t + noise with Var(t) = (20^2 - 1) / 12 = 33.25 and noise of variance 1."""
    noise = f64([-1.0, 1.0] * 4).expand(20, 8)
    time = torch.arange(20, dtype=torch.float64)[:, None].expand(20, 8)
    overall, within = explained_variance(time, time + noise)
    assert overall.item() == pytest.approx(1.0 - 1.0 / 34.25)
    assert within.item() == pytest.approx(0.0, abs=1e-12)


def test_a_critic_with_half_of_the_noise_explains_three_quarters() -> None:
    noise = f64([-1.0, 1.0] * 4).expand(20, 8)
    time = torch.arange(20, dtype=torch.float64)[:, None].expand(20, 8)
    _, within = explained_variance(time + 0.5 * noise, time + noise)
    assert within.item() == pytest.approx(0.75)


def test_explained_variance_of_a_harmful_critic_is_negative() -> None:
    returns = torch.randn(20, 8, dtype=torch.float64)
    overall, within = explained_variance(-returns, returns)
    assert overall.item() == pytest.approx(-3.0)
    assert within.item() == pytest.approx(-3.0)


def test_explained_variance_ignores_steps_of_weight_zero() -> None:
    torch.manual_seed(5)
    returns, noise = torch.randn(2, 20, 8, dtype=torch.float64)
    weight = (torch.rand(20, 8) < 0.7).double()
    weight[:2] = 0.0  # a step without a valid environment
    values = returns + 0.5 * noise
    wild = torch.where(weight > 0, values, 1e3)
    found = explained_variance(wild, returns, weight)
    kept, error = returns[weight > 0], (returns - values)[weight > 0]
    expected = 1.0 - error.var(correction=0) / kept.var(correction=0)
    assert found[0].item() == pytest.approx(expected.item())
    assert 0.5 < found[1].item() < 1.0


def test_the_baseline_of_a_group_is_the_mean_of_its_other_members() -> None:
    torch.manual_seed(5)
    advantages = torch.randn(3, 8, dtype=torch.float64)
    found = leave_one_out(advantages, 4)
    for t in range(3):
        for i in range(8):
            first = i // 4 * 4
            others = [float(advantages[t, j]) for j in range(first, first + 4) if j != i]
            expected = float(advantages[t, i]) - sum(others) / 3
            assert abs(float(found[t, i]) - expected) < 1e-12


def test_the_baseline_in_a_pair_is_the_other_member() -> None:
    found = leave_one_out(torch.tensor([[1.0, 4.0, 2.0, 2.5]]), 2)
    torch.testing.assert_close(found, torch.tensor([[-3.0, 3.0, -0.5, 0.5]]))


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_without_other_members_has_no_baseline(size: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {size} of 8"):
        leave_one_out(torch.zeros(2, 8), size)
