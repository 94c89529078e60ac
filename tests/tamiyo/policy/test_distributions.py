"""Distributions of actions, against those of torch and SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import distributions

from esper.tamiyo.policy.action_masks import MaskedCategorical
from esper.tamiyo.policy.distributions import ActionDistribution, SquashedNormal
from support import F64

MEAN = torch.tensor([[0.0, 0.8], [-1.5, 0.3], [2.5, -0.1]], dtype=F64)
LOG_DEVIATION = torch.tensor([0.2, -1.0], dtype=F64)


def squashed() -> SquashedNormal:
    return SquashedNormal(MEAN.clone().requires_grad_(), LOG_DEVIATION.clone().requires_grad_())


def test_log_probabilities_differ_from_those_of_tanh_by_its_jacobian_alone() -> None:
    """And their gradients do not differ."""
    ours, mean, log_deviation = squashed(), MEAN.clone(), LOG_DEVIATION.clone()
    mean.requires_grad_()
    log_deviation.requires_grad_()
    normal = distributions.Normal(mean, log_deviation.exp())
    theirs = distributions.TransformedDistribution(normal, [distributions.TanhTransform()])
    draws = torch.tensor([[0.3, 0.2], [-2.0, 0.9], [1.0, -0.4]], dtype=F64)
    reference = theirs.log_prob(draws.tanh()) + (1.0 - draws.tanh().square()).log()
    log_prob = ours.log_prob(draws)
    assert torch.allclose(log_prob, reference, atol=1e-12)
    log_prob.sum().backward()
    reference.sum().backward()
    assert torch.allclose(ours.mean.grad, mean.grad)
    assert torch.allclose(ours.log_deviation.grad, log_deviation.grad)


def test_the_entropy_is_that_of_what_the_environment_sees() -> None:
    torch.manual_seed(0)
    normal = distributions.Normal(MEAN, LOG_DEVIATION.exp())
    theirs = distributions.TransformedDistribution(normal, [distributions.TanhTransform()])
    draws = normal.sample((400_000,))
    logs = theirs.base_dist.log_prob(draws) - (1.0 - draws.tanh().square()).log()
    assert torch.allclose(squashed().entropy(), -logs.mean(0), atol=0.01)
    uniform = SquashedNormal(torch.zeros(1, 1, dtype=F64), torch.tensor([0.2], dtype=F64))
    assert 0.0 < math.log(2.0) - float(uniform.entropy()) < 0.15


def test_draws_have_the_quantiles_of_a_normal_distribution() -> None:
    uniform = torch.tensor([1e-7, 0.1, 0.5, 0.9, 1 - 1e-6])[:, None]
    one = SquashedNormal(torch.full((5, 1), 0.5), torch.tensor([math.log(2.0)]))
    expected = stats.norm.ppf(uniform.numpy().astype(np.float64), 0.5, 2.0)
    assert one.sample(uniform).numpy() == pytest.approx(expected, abs=1e-5)


def test_options_and_numbers_are_independent_parts_of_one_action() -> None:
    mask = torch.tensor([[[True, False, True], [True, True, False]]] * 3)
    options = MaskedCategorical(torch.randn(3, 2, 3, dtype=F64), mask)
    both = ActionDistribution(options, squashed(), 2)
    noise = torch.rand(3, 4, 3)
    actions = both.sample(noise)
    assert actions.shape == (3, 4)
    assert torch.equal(actions[:, :2].long(), options.sample(noise[:, :2]))
    assert torch.equal(actions[:, 2:], both.numbers.sample(noise[:, 2:, 0]))
    parts = options.log_prob(actions[:, :2].long()).sum(-1)
    parts = parts + both.numbers.log_prob(actions[:, 2:]).sum(-1)
    assert torch.equal(both.log_prob(actions), parts)
    assert both.entropy().shape == (3, 3)
    assert torch.equal(both.entropy()[:, 2], both.numbers.entropy().sum(-1))
    most_probable = both.sample(None)
    assert torch.equal(most_probable[:, :2].long(), options.mode)
    assert torch.equal(most_probable[:, 2:], MEAN)
