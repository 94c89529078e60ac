"""The loss and its closed-form gradient against the paper's formula under autograd."""

import pytest
import torch
from torch import Tensor

from esper.simic.loss import ppo_loss
from esper.tamiyo.policy.interface import Evaluation

STEPS, SEQUENCES, HEADS = 9, 8, 3
CLIP, ENTROPY_WEIGHT, VALUE_WEIGHT = 0.2, 0.03, 0.7


def said_and_given(padded: bool) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """What a policy says (leaves), what it is compared with, and weights; float64."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*more: int) -> Tensor:
        shape = STEPS, SEQUENCES, *more
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    said = [drawn(), drawn(HEADS).abs(), drawn()]
    given = [said[0] + 0.4 * drawn(), drawn(), drawn()]
    weight = (torch.rand(STEPS, SEQUENCES, generator=generator) < 0.7).double() if padded else None
    return [x.requires_grad_() for x in said], given, weight


def loss_of(said: list[Tensor], given: list[Tensor], weight: Tensor | None) -> Tensor:
    choice = torch.ones(STEPS, SEQUENCES, HEADS, dtype=torch.bool)
    log_prob, entropy, value = said
    evaluation = Evaluation(log_prob, entropy, choice, value)
    scalars = torch.tensor(CLIP), torch.tensor(ENTROPY_WEIGHT)
    return ppo_loss(evaluation, *given, weight, *scalars, VALUE_WEIGHT)[0]


def formula(said: list[Tensor], given: list[Tensor], weight: Tensor | None) -> Tensor:
    """Equation 9 of the paper, term by term over the steps that count."""
    (log_prob, entropy, value), (old, advantages, targets) = said, given
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
    said, given, weight = said_and_given(padded)
    found, expected = (f(said, given, weight) for f in (loss_of, formula))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    pairs = zip(
        torch.autograd.grad(3.0 * found, said),
        torch.autograd.grad(3.0 * expected, said),
        strict=True,
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-12)


def test_the_drawn_cases_cover_every_branch_of_the_clip() -> None:
    said, (old, advantages, _), _ = said_and_given(padded=False)
    ratio = (said[0] - old).exp()
    for side in (ratio < 1 - CLIP, (ratio - 1).abs() < CLIP, ratio > 1 + CLIP):
        for sign in (advantages < 0, advantages > 0):
            assert bool((side & sign).any())


def test_padding_changes_neither_loss_nor_gradients() -> None:
    said, given, weight = said_and_given(padded=True)
    assert weight is not None
    with torch.no_grad():
        said[0][weight == 0] = 1e6
    loss = loss_of(said, given, weight)
    assert bool(loss.isfinite())
    for gradient in torch.autograd.grad(loss, said):
        assert bool(gradient.isfinite().all())
        assert bool((gradient[weight == 0] == 0).all())
