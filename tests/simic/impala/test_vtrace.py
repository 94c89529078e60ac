"""V-trace against naive loops, closed forms, generalised advantages and RLlib."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from esper.simic.advantage import generalised_advantages
from esper.simic.impala import VTrace, vtrace

F64 = torch.float64


def naive(data: dict[str, Tensor], gamma: float, rho_bar: float, c_bar: float, decay: float):
    """Equation 1 of Espeholt et al. (2018) as a double sum in Python floats, one state at a time.

    ``v_s = V(x_s) + sum_{t=s}^{end} gamma^(t-s) (prod_{i=s}^{t-1} c_i) delta_t``.
    """
    steps, count = data["rewards"].shape
    x = {name: tensor.tolist() for name, tensor in data.items()}
    targets, advantages = (torch.zeros(steps, count, dtype=F64) for _ in range(2))
    for n in range(count):
        ratio = [math.exp(x["log_ratio"][t][n]) for t in range(steps)]
        value = [x["values"][t][n] for t in range(steps)] + [x["last_value"][n]]
        stops = [x["terminated"][t][n] or x["truncated"][t][n] for t in range(steps)]

        def following(t: int, values: list[float], n: int = n) -> float:
            return 0.0 if x["terminated"][t][n] else values[t + 1]

        def delta(t: int, ratio=ratio, value=value, n: int = n) -> float:
            error = x["rewards"][t][n] + gamma * following(t, value) - value[t]
            return min(rho_bar, ratio[t]) * error

        v = [*value]
        for s in range(steps):
            weight, t = 1.0, s
            while True:
                v[s] += weight * delta(t)
                if stops[t] or t + 1 == steps:
                    break
                weight *= gamma * decay * min(c_bar, ratio[t])
                t += 1
        for s in range(steps):
            q = decay * v[s + 1] + (1.0 - decay) * value[s + 1]
            if x["truncated"][s][n]:
                q = value[s + 1]
            if x["terminated"][s][n]:
                q = 0.0
            targets[s, n] = v[s]
            error = x["rewards"][s][n] + gamma * q - value[s]
            advantages[s, n] = min(rho_bar, ratio[s]) * error
    return targets, advantages


def drawn(seed: int, steps: int, count: int, spread: float = 0.8) -> dict[str, Tensor]:
    """Random inputs of ``vtrace``; a step is terminated or truncated, never both."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    ends = torch.rand(steps, count, generator=generator)
    return {
        "log_ratio": spread * normal(steps, count),
        "rewards": normal(steps, count),
        "values": normal(steps, count),
        "last_value": normal(count),
        "terminated": ends < 0.15,
        "truncated": ends > 0.85,
    }


@pytest.mark.parametrize("steps", [1, 2, 7, 23])
def test_targets_and_advantages_equal_a_naive_loop(steps: int) -> None:
    for seed, (rho_bar, c_bar), decay in product(
        range(3), [(1.0, 1.0), (2.0, 0.5), (50.0, 1.3), (0.3, 0.3)], [1.0, 0.9, 0.0]
    ):
        data = drawn(seed, steps, 5)
        found = vtrace(**data, discount=0.97, rho_clip=rho_bar, c_clip=c_bar, trace_decay=decay)
        targets, advantages = naive(data, 0.97, rho_bar, c_bar, decay)
        torch.testing.assert_close(found.targets, targets, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.advantages, advantages, rtol=1e-12, atol=1e-12)


def test_targets_match_a_hand_computed_example() -> None:
    """Two steps, gamma 0.5, ratios 2 and 0.5, rewards 1 and 2, values 1 and 3, then 4.

    delta_1 = 0.5 (2 + 0.5 * 4 - 3) = 0.5      v_1 = 3 + 0.5 = 3.5
    delta_0 = 1 (1 + 0.5 * 3 - 1)   = 1.5      v_0 = 1 + 1.5 + 0.5 * 1 * 0.5 = 2.75
    A_1 = 0.5 (2 + 0.5 * 4 - 3) = 0.5          A_0 = 1 (1 + 0.5 * 3.5 - 1)   = 1.75
    """
    column = torch.tensor([[1.0], [2.0]], dtype=F64)
    found = vtrace(
        torch.tensor([[2.0], [0.5]], dtype=F64).log(), column,
        torch.tensor([[1.0], [3.0]], dtype=F64), torch.tensor([4.0], dtype=F64),
        torch.zeros(2, 1, dtype=torch.bool), 0.5,
    )  # fmt: skip
    torch.testing.assert_close(found.targets[:, 0], torch.tensor([2.75, 3.5], dtype=F64))
    torch.testing.assert_close(found.advantages[:, 0], torch.tensor([1.75, 0.5], dtype=F64))


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_on_policy_it_equals_generalised_advantages(decay: float) -> None:
    for seed in range(3):
        data = drawn(seed, 30, 6, spread=0.0)
        found = vtrace(**data, discount=0.98, trace_decay=decay)
        del data["log_ratio"]
        advantages, returns = generalised_advantages(**data, discount=0.98, trace_decay=decay)
        torch.testing.assert_close(found.advantages, advantages, rtol=0.0, atol=1e-12)
        torch.testing.assert_close(found.targets, returns, rtol=0.0, atol=1e-12)


def test_on_policy_with_lambda_one_targets_are_monte_carlo_returns() -> None:
    data = drawn(4, 12, 3, spread=0.0)
    data["truncated"][:] = False
    found = vtrace(**data, discount=0.9)
    following = data["last_value"]
    for t in reversed(range(12)):
        following = data["rewards"][t] + 0.9 * following * (~data["terminated"][t])
        torch.testing.assert_close(found.targets[t], following)


def test_with_a_large_rho_clip_targets_estimate_the_policy_that_learns() -> None:
    """One decision between rewards 1 and 5; behaviour takes the second one in 10 % of cases.

    The value under the policy that learns, which takes it in 60 %, is 0.4 * 1 + 0.6 * 5 = 3.4. With
    rho clipped at 1 the fixed point is that of the policy of remark 1 of the paper, proportional to
    min(mu, pi) = (0.4, 0.1): 0.8 * 1 + 0.2 * 5 = 1.8.
    """
    generator = torch.Generator().manual_seed(0)
    second = torch.rand(1, 400_000, generator=generator, dtype=F64) < 0.1
    log_ratio = torch.where(second, math.log(0.6 / 0.1), math.log(0.4 / 0.9)).to(F64)
    rewards = torch.where(second, 5.0, 1.0).to(F64)

    def mean_correction(value: float, rho_clip: float) -> float:
        values = torch.full_like(rewards, value)
        over = torch.ones_like(second)
        found = vtrace(
            log_ratio, rewards, values, values[0], over, 1.0, rho_clip=rho_clip, c_clip=1.0
        )
        return float((found.targets - values).mean())

    assert mean_correction(3.4, 1e9) == pytest.approx(0.0, abs=0.03)
    assert mean_correction(1.8, 1.0) == pytest.approx(0.0, abs=0.01)
    assert mean_correction(3.4, 1.0) < -0.5


def test_ratios_that_overflow_are_clipped() -> None:
    data = {name: x.float() if x.dtype == F64 else x for name, x in drawn(5, 9, 4).items()}
    data["log_ratio"] *= 1e4
    found = vtrace(**data, discount=0.99)
    assert bool(found.targets.isfinite().all())
    assert bool(found.advantages.isfinite().all())
    assert float(found.rho.max()) == 1.0


@pytest.mark.slow
def test_targets_and_advantages_equal_those_of_rllib() -> None:
    """RLlib has no truncation and no lambda, and clips c at 1; its discount is 0 after an end."""
    reference = pytest.importorskip(
        "ray.rllib.algorithms.impala.torch.vtrace_torch_v2",
        reason="RLlib is not installed: `make test-all` sets up an environment with it",
    )
    for seed, rho_bar in product(range(5), [1.0, 1.7]):
        data = drawn(seed, 40, 8)
        data["truncated"][:] = False
        found: VTrace = vtrace(**data, discount=0.97, rho_clip=rho_bar)
        behaviour = torch.randn(40, 8, dtype=F64)
        targets, advantages = reference.vtrace_torch(
            target_action_log_probs=behaviour + data["log_ratio"],
            behaviour_action_log_probs=behaviour, discounts=0.97 * (~data["terminated"]).to(F64),
            rewards=data["rewards"], values=data["values"], bootstrap_values=data["last_value"],
            clip_rho_threshold=rho_bar, clip_pg_rho_threshold=rho_bar,
        )  # fmt: skip
        torch.testing.assert_close(found.targets, targets, rtol=0.0, atol=1e-6)
        torch.testing.assert_close(found.advantages, advantages, rtol=0.0, atol=1e-6)
