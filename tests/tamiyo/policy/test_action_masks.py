"""Action masks compared with their definition, masked distributions with torch in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from esper.leyline.actions import (
    CANONICAL_CHOICE,
    CHOICE_HEADS,
    HEAD_WIDTHS,
    HEADS,
    RELEVANT_HEADS,
    Op,
)
from esper.tamiyo.policy.action_masks import ActionMasks, MaskedCategorical, relevance
from synthetic import random_masks

SMALLEST, LARGEST = 2.0**-24, 1.0 - 2.0**-24
"""The extremes of ``esper.kasmina.rng.uniform``."""

# --- masks ------------------------------------------------------------------------------------


@pytest.fixture
def masks() -> ActionMasks:
    return random_masks((5, 7), 3, torch.Generator().manual_seed(1))


def test_an_op_is_legal_exactly_if_some_slot_allows_it(masks) -> None:
    for t, n, op in torch.cartesian_prod(torch.arange(5), torch.arange(7), torch.arange(len(Op))):
        assert masks.ops[t, n, op].item() == any(masks.slots[t, n, op].tolist())
    assert masks.ops.float().mean() < 0.95


def test_legal_slots_depend_on_the_drawn_op(masks) -> None:
    op = torch.randint(len(Op), (5, 7), generator=torch.Generator().manual_seed(2))
    slots = masks.slots_of(op)
    for t in range(5):
        for n in range(7):
            assert torch.equal(slots[t, n], masks.slots[t, n, op[t, n]])


def test_relevance_matches_the_table_of_relevant_heads() -> None:
    table = relevance(torch.tensor([list(Op)]))[0]
    for op in Op:
        assert {h for h, matters in zip(HEADS, table[op], strict=True) if matters} == set(
            RELEVANT_HEADS[op]
        )


@pytest.mark.parametrize("op", Op)
def test_irrelevant_heads_have_only_their_canonical_option(masks, op) -> None:
    ops = torch.full((5, 7), int(op))
    slot = torch.randint(3, (5, 7), generator=torch.Generator().manual_seed(3))
    options = masks.choices_of(ops, slot)
    for i, head in enumerate(CHOICE_HEADS):
        for t in range(5):
            for n in range(7):
                found = set(options[t, n, i].nonzero()[:, 0].tolist())
                expected = {CANONICAL_CHOICE[head]}
                if head in RELEVANT_HEADS[op]:
                    expected = set(range(HEAD_WIDTHS[head]))
                    if head == "blueprint":
                        expected = set(masks.kinds[t, n, slot[t, n]].nonzero()[:, 0].tolist())
                assert found == expected, (head, t, n)


def test_noop_is_never_legal(masks) -> None:
    germinate = torch.full((5, 7), int(Op.GERMINATE))
    for slot in range(3):
        options = masks.choices_of(germinate, torch.full((5, 7), slot))
        assert not bool(options[..., CHOICE_HEADS.index("blueprint"), 0].any())


# --- distributions ----------------------------------------------------------------------------


def random_rows(rows: int, options: int, seed: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits in float64 and masks with at least one legal option."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, options, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, options, generator=generator) < 0.5
    mask[torch.arange(rows), torch.randint(options, (rows,), generator=generator)] = True
    return logits, mask


def on_the_legal(logits: Tensor, mask: Tensor) -> Categorical:
    """Torch's categorical distribution over the legal options of one row, in float64."""
    return Categorical(logits=logits.double()[mask], validate_args=False)


def test_distribution_matches_the_categorical_over_legal_options() -> None:
    logits, mask = random_rows(50, 7, seed=1)
    ours = MaskedCategorical(logits, mask)
    for row in range(50):
        theirs = on_the_legal(logits[row], mask[row])
        legal = mask[row].nonzero()[:, 0]
        for place, option in enumerate(legal):
            log_prob = ours.log_prob(option.expand(50))[row]
            assert log_prob.item() == pytest.approx(theirs.log_prob(torch.tensor(place)).item())
        assert ours.entropy()[row].item() == pytest.approx(theirs.entropy().item())
        assert ours.mode[row] == legal[theirs.probs.argmax()]


@pytest.mark.parametrize("quantity", ["log_prob", "entropy"])
def test_gradients_match_the_categorical_over_legal_options(quantity) -> None:
    logits, mask = random_rows(40, 6, seed=2)
    option = mask.float().argmax(1)
    mine = logits.clone().requires_grad_()
    ours = MaskedCategorical(mine, mask)
    (ours.log_prob(option) if quantity == "log_prob" else ours.entropy()).sum().backward()
    for row in range(40):
        leaf = logits[row].clone().requires_grad_()
        theirs = on_the_legal(leaf, mask[row])
        first = torch.tensor(0)
        (theirs.log_prob(first) if quantity == "log_prob" else theirs.entropy()).backward()
        torch.testing.assert_close(mine.grad[row], leaf.grad, rtol=1e-9, atol=1e-12)
    assert bool((mine.grad[~mask] == 0.0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_are_upcast_before_the_softmax(dtype) -> None:
    exact, mask = random_rows(50, 9, seed=3)
    logits = exact.to(dtype).requires_grad_()
    ours = MaskedCategorical(logits, mask)
    option = mask.float().argmax(1)
    log_prob, entropy = ours.log_prob(option), ours.entropy()
    assert log_prob.dtype == entropy.dtype == ours.log_probs.dtype == torch.float32
    for row in range(50):
        theirs = on_the_legal(logits[row].detach(), mask[row])
        expected = theirs.log_prob(torch.tensor(0)).item()
        assert log_prob[row].item() == pytest.approx(expected, abs=1e-5)
        assert entropy[row].item() == pytest.approx(theirs.entropy().item(), abs=1e-5)
    (log_prob.sum() + entropy.sum()).backward()
    assert bool(logits.grad.isfinite().all())
    assert bool((logits.grad[~mask] == 0.0).all())


def test_double_precision_is_preserved() -> None:
    logits, mask = random_rows(3, 4, seed=4)
    assert MaskedCategorical(logits, mask).entropy().dtype == torch.float64


def test_an_illegal_option_is_never_drawn() -> None:
    """Even if its logit is the highest or NaN and the noise favours it."""
    generator = torch.Generator().manual_seed(5)
    _, mask = random_rows(20_000, 8, seed=5)
    logits = torch.randn(20_000, 8, generator=generator) - 1e4 * mask
    logits[:5000][~mask[:5000]] = math.nan
    logits[5000:10_000][~mask[5000:10_000]] = math.inf
    distribution = MaskedCategorical(logits, mask)
    favoured = torch.where(mask, SMALLEST, LARGEST)
    uniform = torch.rand(mask.shape, generator=generator).clamp(SMALLEST, LARGEST)
    extremes = torch.where(uniform < 0.5, SMALLEST, LARGEST)
    for chance in (favoured, uniform, extremes):
        drawn = distribution.sample(chance)
        assert bool(mask.gather(1, drawn[:, None]).all())
    assert bool(mask.gather(1, distribution.mode[:, None]).all())
    assert bool((distribution.log_probs[~mask] < -1e8).all())
    assert bool((distribution.log_probs.exp()[~mask] == 0.0).all())


def test_logits_of_illegal_options_have_no_effect() -> None:
    logits, mask = random_rows(30, 6, seed=6)
    option = mask.float().argmax(1)
    expected = MaskedCategorical(logits, mask)
    for nonsense in (math.nan, math.inf, -math.inf, 1e30):
        leaf = logits.masked_fill(~mask, nonsense).requires_grad_()
        other = MaskedCategorical(leaf, mask)
        assert torch.equal(other.log_prob(option), expected.log_prob(option))
        assert torch.equal(other.entropy(), expected.entropy())
        (other.log_prob(option) + other.entropy()).sum().backward()
        assert bool(leaf.grad.isfinite().all())
        assert bool((leaf.grad[~mask] == 0.0).all())


def test_sample_frequencies_match_the_probabilities() -> None:
    """Chi-square with three degrees of freedom exceeds 25 once in 65,000 seeds."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, 5.0])
    mask = torch.tensor([True, True, False, True, True, False])
    draws = 40_000
    uniform = torch.rand(draws, 6, generator=torch.Generator().manual_seed(7))
    uniform = uniform.clamp(SMALLEST, LARGEST)
    distribution = MaskedCategorical(logits.expand(draws, -1), mask.expand(draws, -1))
    counted = distribution.sample(uniform).bincount(minlength=6).double()[mask]
    expected = draws * on_the_legal(logits, mask).probs
    assert ((counted - expected).square() / expected).sum().item() < 25.0


def test_a_single_legal_option_is_certain() -> None:
    logits, _ = random_rows(4, 5, seed=8)
    mask = torch.eye(5).bool()[:4]
    leaf = logits.clone().requires_grad_()
    distribution = MaskedCategorical(leaf, mask)
    log_prob = distribution.log_prob(torch.arange(4))
    assert bool((log_prob == 0.0).all())
    assert bool((distribution.entropy() == 0.0).all())
    (log_prob + distribution.entropy()).sum().backward()
    assert bool((leaf.grad == 0.0).all())


def test_a_row_without_a_legal_option_is_an_error() -> None:
    mask = torch.ones(3, 4).bool()
    mask[1] = False
    with pytest.raises(ValueError, match="no legal option"):
        MaskedCategorical(torch.zeros(3, 4), mask)


@pytest.mark.parametrize("size", [1e2, 1e4, 6e4, 1e8, 1e30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits_give_no_nan_and_no_illegal_option(size, dtype) -> None:
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 4)
    logits = (min(size, torch.finfo(dtype).max) * signs).to(dtype).requires_grad_()
    mask = torch.tensor([True, True, False, True]).expand(len(signs), -1)
    distribution = MaskedCategorical(logits, mask)
    quantities = [distribution.log_prob(torch.zeros(len(signs)).long()), distribution.entropy()]
    for quantity in quantities:
        assert bool(quantity.isfinite().all())
    assert bool((distribution.mode != 2).all())
    assert bool((distribution.sample(torch.full(mask.shape, 0.5)) != 2).all())
    sum(quantities).sum().backward()
    assert bool(logits.grad.isfinite().all())


def test_large_negative_logits_keep_their_probability_ratios() -> None:
    """The logit of illegal options must be lower than any legal one."""
    logits = torch.tensor([[-6e4, -6e4 + 1.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    distribution = MaskedCategorical(logits, mask)
    expected = math.log(1.0 / (1.0 + math.exp(-1.0)))
    assert distribution.log_prob(torch.tensor([1])).item() == pytest.approx(expected, abs=1e-4)
    assert distribution.mode.item() == 1
