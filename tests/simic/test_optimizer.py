"""The policy's optimizer: torch's Adam, skipped steps, state by name."""

import pytest
import torch
from torch import Tensor, nn

from esper.simic.gradients import GradientNorms
from esper.simic.optimizer import PolicyOptimizer
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from synthetic import CPU


def policy_with_gradients(seed: int = 0) -> FactoredLSTM:
    torch.manual_seed(seed)
    policy = FactoredLSTM(8)
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return policy


def stepped(skips: list[float]) -> tuple[dict[str, Tensor], PolicyOptimizer]:
    policy = policy_with_gradients()
    optimizer = PolicyOptimizer(policy, CPU)
    optimizer.set_rates({"policy": 1e-2, "value": 3e-2})
    for skip in skips:
        optimizer.step_unless(torch.tensor(skip))
    return dict(policy.state_dict()), optimizer


def flat(state: dict) -> dict[str, Tensor]:
    return {f"{n}/{k}": torch.as_tensor(x) for n, p in state.items() for k, x in p.items()}


def test_steps_are_those_of_plain_adam() -> None:
    """They equal torch's per-tensor loop."""
    policy = policy_with_gradients()
    critic = {id(p) for p in policy.head_parameters("value")}
    groups = [[p for p in policy.parameters() if (id(p) in critic) == own] for own in (False, True)]
    plain = torch.optim.Adam(
        [{"params": g, "lr": lr} for g, lr in zip(groups, (1e-2, 3e-2), strict=True)],
        eps=1e-5,
        foreach=False,
    )
    for _ in range(4):
        plain.step()
    weights, _ = stepped([0.0] * 4)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_one_call_for_actor_and_critic_gives_the_bits_of_two() -> None:
    weights = []
    for apart in (True, False):
        policy = policy_with_gradients()
        optimizer = PolicyOptimizer(policy, CPU, apart)
        optimizer.set_rates({"policy": 1e-2, "value": 1e-2})
        for _ in range(3):
            optimizer.step_unless(torch.tensor(0.0))
        weights.append(policy.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_skipped_step_changes_no_bit() -> None:
    with_skips, one = stepped([1.0, 0.0, 1.0, 0.0, 1.0])
    without, other = stepped([0.0, 0.0])
    assert all(torch.equal(with_skips[name], without[name]) for name in without)
    mine, theirs = flat(one.state()), flat(other.state())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_state_restored_by_name_continues_in_the_same_bits() -> None:
    _, optimizer = stepped([0.0, 0.0])
    stored = {n: {k: x.clone() for k, x in p.items()} for n, p in optimizer.state().items()}
    optimizer.step_unless(torch.tensor(0.0))
    policy = policy_with_gradients()
    again = PolicyOptimizer(policy, CPU)
    again.set_rates({"policy": 1e-2, "value": 3e-2})
    again.load(dict(reversed(list(stored.items()))))  # the order must not matter
    again.step_unless(torch.tensor(0.0))
    mine, theirs = flat(again.state()), flat(optimizer.state())
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_state_of_another_network_is_refused() -> None:
    _, optimizer = stepped([0.0])
    stored = optimizer.state()
    with pytest.raises(KeyError, match="stranger"):
        optimizer.load(stored | {"stranger": {}})
    name = optimizer.names[0]
    wrong = {k: torch.zeros(3) for k in stored[name]}
    with pytest.raises(ValueError, match=name):
        optimizer.load(stored | {name: wrong})


def test_moments_that_are_not_finite_are_detected() -> None:
    _, optimizer = stepped([0.0])
    assert bool(optimizer.finite())
    optimizer.states[optimizer.parameters[3]]["exp_avg_sq"].view(-1)[0] = torch.inf
    assert not bool(optimizer.finite())


def test_norms_and_clipping_equal_those_of_torch() -> None:
    policy = policy_with_gradients()
    norms = GradientNorms(policy, CPU)
    norm, heads = norms.measure()
    for head, value in heads.items():
        own = torch.cat([p.grad.flatten() for p in policy.head_parameters(head)])
        assert value.item() == pytest.approx(own.norm().item(), rel=1e-5), head
    norms.clip(norm, 0.5)
    reference = policy_with_gradients()
    total = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    assert norm.item() == pytest.approx(total.item(), rel=1e-5)
    for mine, theirs in zip(policy.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_norm_of_a_missing_gradient_is_none() -> None:
    policy = policy_with_gradients()
    policy.slot_head.out.weight.grad = None
    policy.op_head.out.weight.grad[0, 0] = torch.nan
    norm, heads = GradientNorms(policy, CPU).measure()
    assert heads["slot"] is None
    assert heads["op"].isnan()
    assert heads["value"].isfinite()
    assert norm.isnan()
