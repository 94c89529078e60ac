"""The loss and its closed-form gradient against the paper's formula under autograd."""

import math

import pytest
import torch
from torch import Tensor

from esper.simic.loss import ppo_loss
from esper.tamiyo.policy.interface import Evaluation

STEPS, SEQUENCES, HEADS = 9, 8, 3
CLIP, ENTROPY_WEIGHT, VALUE_WEIGHT = 0.2, 0.03, 0.7


def outputs_and_data(padded: bool) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """A policy's outputs (leaf tensors), the stored data and the weights, in float64."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*more: int) -> Tensor:
        shape = STEPS, SEQUENCES, *more
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    outputs = [drawn(), drawn(HEADS).abs(), drawn()]
    data = [outputs[0] + 0.4 * drawn(), drawn(), drawn()]
    weight = (torch.rand(STEPS, SEQUENCES, generator=generator) < 0.7).double() if padded else None
    return [x.requires_grad_() for x in outputs], data, weight


def loss_of(outputs: list[Tensor], data: list[Tensor], weight: Tensor | None) -> Tensor:
    choice = torch.ones(STEPS, SEQUENCES, HEADS, dtype=torch.bool)
    log_prob, entropy, value = outputs
    evaluation = Evaluation(log_prob, entropy, choice, value)
    scalars = torch.tensor(CLIP), torch.tensor(ENTROPY_WEIGHT)
    return ppo_loss(evaluation, *data, weight, *scalars, VALUE_WEIGHT)[0]


def formula(outputs: list[Tensor], data: list[Tensor], weight: Tensor | None) -> Tensor:
    """Equation 9 of the paper, term by term over the steps that count."""
    (log_prob, entropy, value), (old, advantages, targets) = outputs, data
    terms = []
    for t in range(STEPS):
        for m in range(SEQUENCES):
            if weight is not None and weight[t, m] == 0:
                continue
            ratio = (log_prob[t, m] - old[t, m]).exp()
            gain = torch.minimum(
                ratio * advantages[t, m], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[t, m]
            )
            error = 0.5 * (value[t, m] - targets[t, m]) ** 2
            terms.append(-gain + VALUE_WEIGHT * error - ENTROPY_WEIGHT * entropy[t, m].sum())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_gradient_equal_those_of_the_formula(padded: bool) -> None:
    outputs, data, weight = outputs_and_data(padded)
    found, expected = (f(outputs, data, weight) for f in (loss_of, formula))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    pairs = zip(
        torch.autograd.grad(3.0 * found, outputs),
        torch.autograd.grad(3.0 * expected, outputs),
        strict=True,
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-12)


def test_the_drawn_cases_cover_every_branch_of_the_clip() -> None:
    outputs, (old, advantages, _), _ = outputs_and_data(padded=False)
    ratio = (outputs[0] - old).exp()
    for side in (ratio < 1 - CLIP, (ratio - 1).abs() < CLIP, ratio > 1 + CLIP):
        for sign in (advantages < 0, advantages > 0):
            assert bool((side & sign).any())


def test_padding_changes_neither_loss_nor_gradients() -> None:
    outputs, data, weight = outputs_and_data(padded=True)
    assert weight is not None
    with torch.no_grad():
        outputs[0][weight == 0] = 1e6
    loss = loss_of(outputs, data, weight)
    assert bool(loss.isfinite())
    for gradient in torch.autograd.grad(loss, outputs):
        assert bool(gradient.isfinite().all())
        assert bool((gradient[weight == 0] == 0).all())


@pytest.mark.parametrize("padded", [False, True])
def test_metrics_equal_their_definitions_step_by_step(padded: bool) -> None:
    """The divergence is the estimator ``r - 1 - ln r`` of Schulman (2020), never negative."""
    (log_prob, entropy, value), data, weight = outputs_and_data(padded)
    choice = torch.ones(STEPS, SEQUENCES, HEADS, dtype=torch.bool)
    scalars = torch.tensor(CLIP), torch.tensor(ENTROPY_WEIGHT)
    evaluation = Evaluation(log_prob, entropy, choice, value)
    _, metrics = ppo_loss(evaluation, *data, weight, *scalars, VALUE_WEIGHT)
    counted = torch.ones(STEPS, SEQUENCES) if weight is None else weight
    ratios = (log_prob - data[0]).exp()[counted > 0].tolist()
    mean = len(ratios)
    expected = {
        "approx_kl": sum(r - 1.0 - math.log(r) for r in ratios) / mean,
        "clip_fraction": sum(abs(r - 1.0) > CLIP for r in ratios) / mean,
        "ratio_variance": sum((r - 1.0) ** 2 for r in ratios) / mean,
    }
    assert 0.0 < expected["clip_fraction"] < 1.0
    assert {n: metrics[n].item() for n in expected} == pytest.approx(expected, rel=1e-5)
