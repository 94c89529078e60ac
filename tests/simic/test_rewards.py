"""Rewards: what they add up to, and which way they point."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.simic.rewards import RENT, paired_reward, terminal_reward, utility

scores = st.floats(0.0, 1.0)
parameters = st.integers(0, 10**7)
hosts = st.integers(1, 10**7)


def f64(value) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


@settings(deadline=None)
@given(scores, parameters, hosts)
def test_utility_is_the_score_less_the_rent(score, added, host) -> None:
    expected = score - 0.05 * math.log(1.0 + added / host)
    assert utility(f64(score), torch.tensor(added), host).item() == pytest.approx(expected)


@settings(deadline=None)
@given(scores, parameters, hosts, st.integers(1, 10**6))
def test_every_added_parameter_costs(score, added, host, more) -> None:
    less = utility(f64(score), torch.tensor(added), host)
    assert utility(f64(score), torch.tensor(added + more), host) < less


@settings(deadline=None)
@given(scores, scores, parameters, hosts)
def test_a_better_score_is_worth_what_it_is(one, other, added, host) -> None:
    added = torch.tensor(added)
    gained = utility(f64(one), added, host) - utility(f64(other), added, host)
    assert gained.item() == pytest.approx(one - other, abs=1e-12)


def test_doubling_a_host_costs_three_and_a_half_points() -> None:
    cost = utility(f64(0.6), torch.tensor(0), 500) - utility(f64(0.6), torch.tensor(500), 500)
    assert cost.item() == pytest.approx(RENT * math.log(2.0))
    assert cost.item() == pytest.approx(0.0347, abs=1e-4)


@st.composite
def episodes(draw) -> tuple[Tensor, Tensor]:
    """Utilities and twin scores of an episode, ``[T, N]`` each."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 60)), draw(st.integers(1, 5)))
    return (
        torch.rand(shape, generator=generator, dtype=torch.float64),
        torch.rand(shape, generator=generator, dtype=torch.float64),
    )


def paired_return(utilities: Tensor, twins: Tensor) -> Tensor:
    gain, total = torch.zeros_like(utilities[0]), torch.zeros_like(utilities[0])
    for now, twin in zip(utilities, twins, strict=True):
        total += paired_reward(now, twin, gain)
        gain = now - twin
    return total


def terminal_return(utilities: Tensor) -> Tensor:
    last = len(utilities) - 1
    return sum(terminal_reward(now, t == last) for t, now in enumerate(utilities))


@settings(deadline=None)
@given(episodes())
def test_paired_rewards_add_up_to_the_final_gain(episode) -> None:
    utilities, twins = episode
    expected = 10.0 * (utilities[-1] - twins[-1])
    torch.testing.assert_close(paired_return(utilities, twins), expected, rtol=0.0, atol=1e-9)


@settings(deadline=None)
@given(episodes())
def test_terminal_rewards_add_up_to_the_final_utility(episode) -> None:
    utilities, _ = episode
    assert torch.equal(terminal_return(utilities), 10.0 * utilities[-1])


@settings(deadline=None)
@given(episodes())
def test_the_two_ways_to_pay_differ_by_the_twin_alone(episode) -> None:
    utilities, twins = episode
    difference = terminal_return(utilities) - paired_return(utilities, twins)
    torch.testing.assert_close(difference, 10.0 * twins[-1], rtol=0.0, atol=1e-9)


def test_terminal_pays_nothing_before_the_end() -> None:
    assert torch.equal(terminal_reward(f64([0.3, 0.9]), last=False), f64([0.0, 0.0]))


@settings(deadline=None)
@given(st.floats(0.1, 0.8), st.floats(0.01, 0.2), parameters.filter(bool), hosts)
def test_gain_pays_and_loss_and_size_cost(score, change, added, host) -> None:
    twin, before = f64(0.5), f64(score) - 0.5
    free = torch.tensor(0)

    def paid(now: float, parameters: Tensor = free, twin: Tensor = twin) -> float:
        return paired_reward(utility(f64(now), parameters, host), twin, before).item()

    assert paid(score) == pytest.approx(0.0, abs=1e-12)
    assert paid(score + change) == pytest.approx(10.0 * change)
    assert paid(score - change) == pytest.approx(-10.0 * change)
    assert paid(score, torch.tensor(added)) < paid(score)
    assert paid(score, twin=twin + change) == pytest.approx(-10.0 * change)  # the twin did better
