"""The line that says whether a policy is learning, and if not, why."""

import random

import pytest
from scipy import stats

from esper.karn.learning_diagnosis import Curve, diagnose

SOUND = {
    "refused": 0.0, "policy_loss": 0.01, "value_loss": 0.3, "grad_norm": 0.5, "approx_kl": 0.01,
    "entropy": 1.0, "head_entropy/op": 0.8, "head_choice/op": 0.9, "explained_variance": 0.4,
}  # fmt: skip
NOISE = [0.3, -0.4, 0.1, -0.2, 0.4, -0.3, 0.2, -0.1, 0.35, -0.25, 0.15, -0.05]
"""Twelve rounds without a trend."""


def verdict(values, fossilised=(), **metrics):
    found = diagnose(
        Curve("gain", " points", values), [{**SOUND, **metrics}] * len(values), fossilised
    )
    assert found is not None
    assert found.text.startswith(found.state)
    assert "\n" not in found.text
    return found


def test_a_rising_gain_is_learning() -> None:
    found = verdict([i + x for i, x in enumerate(NOISE)])
    assert found.state == "learning"
    # The first and the last tenth of twelve rounds are two rounds each.
    first, last = (0.3 + 0.6) / 2, (10.15 + 10.95) / 2
    assert found.text == f"learning: gain from {first:+.3g} to {last:+.3g} points in 12 rounds"


def test_a_gain_that_has_levelled_off_was_learned() -> None:
    level = [10 - 10 * 0.3**i + x for i, x in enumerate([*NOISE, *NOISE])]
    found = verdict(level)
    assert found.state == "learned"
    assert "without a trend since round 13" in found.text
    # Six rounds without a trend would show only the steepest one.
    assert verdict(level[:12]).state == "learning"


def test_a_return_that_rose_at_once_and_sank_at_the_end_was_learned_but_not_steadily() -> None:
    """CartPole with the defaults, seed 42: solved in round 10, and 240 to 500 in the last ones."""
    rose, sank = [20, 60, 150, 300, 420], [481, 500, 221, 500, 392, 437, 241]
    found = verdict([*rose, *[500.0 + x for x in 3 * NOISE], *sank], explained_variance=-1.0)
    assert found.state == "learned"
    assert found.text.endswith("in 48 rounds, but not steadily")
    assert verdict(2 * NOISE).state == "not learning"


def test_a_gain_that_is_always_the_same_is_not_learning() -> None:
    found = verdict([1.0] * 12)
    assert found.text.startswith("not learning: gain is the same in every round")


def test_a_falling_gain_gets_worse() -> None:
    assert verdict([-i + x for i, x in enumerate(NOISE)]).state == "getting worse"


@pytest.mark.parametrize("count", [1, 4])
def test_few_rounds_tell_nothing_but_what_is_broken(count: int) -> None:
    found = verdict([float(i) for i in range(count)])
    assert found.state == "too early"
    assert ";" not in found.text.split("takes")[1]
    assert "refused" in verdict([1.0] * count, refused=1.0).text


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"refused": 1.0}, "refused"), ({"grad_norm": float("nan")}, "grad_norm was not finite"),
        ({"approx_kl": 2.0}, "too far"), ({"approx_kl": 0.31}, "too far"),
        ({"approx_kl": 0.29}, "no cause stands out"),
        ({"value_loss": float("inf")}, "value_loss was not finite"),
        ({"head_entropy/op": 0.001}, "same operation"),
        ({"head_choice/op": 0.0, "head_entropy/op": 0.0}, "no choice"),
        ({"approx_kl": 1e-8}, "next to nothing"), ({"approx_kl": 0.9e-5}, "next to nothing"),
        ({"approx_kl": 1.1e-5}, "no cause stands out"), ({"explained_variance": 0.049}, "critic"),
        ({"explained_variance": 0.051}, "no cause stands out"),
        ({"explained_variance": -0.2}, "critic"),
        ({"explained_variance": None}, "no cause stands out"), ({}, "no cause stands out"),
    ],
)  # fmt: skip
def test_without_a_trend_a_cause_is_named(metrics, says: str) -> None:
    found = verdict(NOISE, **metrics)
    assert found.state == "not learning"
    assert says in found.text


def test_what_is_broken_now_counts_more_than_a_rise_before() -> None:
    found = verdict([i + x for i, x in enumerate(NOISE)], refused=1.0)
    assert found.state == "not learning"
    assert "refused" in found.text


def test_what_was_broken_long_ago_does_not_count() -> None:
    updates = [{**SOUND, "refused": float(i < 3)} for i in range(12)]
    found = diagnose(Curve("gain", "", [i + x for i, x in enumerate(NOISE)]), updates)
    assert found is not None
    assert found.state == "learning"


def test_seeds_that_are_never_kept_are_a_cause() -> None:
    assert "no seed was kept" in verdict(NOISE, fossilised=[0.0] * 12).text
    assert "no seed was kept" not in verdict(NOISE, fossilised=[0.0] * 11 + [0.25]).text


def test_a_gain_that_rose_because_nothing_grows_any_more_is_called_that() -> None:
    values = [min(i - 8.0, 0.0) for i in range(20)]
    found = verdict(values, fossilised=[1.0] * 8 + [0.0] * 12)
    assert found.state == "learned to grow nothing"
    span = "gain from -7.5 to +0 points in 20 rounds"
    assert found.text.startswith(f"learned to grow nothing: {span}; no seed was kept in the last")
    assert verdict(values, fossilised=[1.0] * 20).text.startswith(f"learned: {span}")


def test_a_policy_without_heads_is_diagnosed_by_its_total_entropy() -> None:
    metrics = {"entropy": 0.001, "head_entropy/op": None, "head_choice/op": None}
    assert "same action" in verdict(NOISE, **metrics).text


def test_who_does_not_learn_has_no_verdict() -> None:
    assert diagnose(Curve("gain", "", [1.0] * 9), []) is None
    assert diagnose(Curve("gain", "", [float("nan")]), [SOUND]) is None


def test_noise_is_seldom_taken_for_learning() -> None:
    draw = random.Random(0)
    states = [verdict([draw.gauss(0, 1) for _ in range(20)]).state for _ in range(400)]
    rising = sum(state in ("learning", "learned") for state in states)
    # A two-sided test at 5 % is wrong in each direction in 2.5 % of the cases.
    assert rising <= stats.binom.ppf(0.999, 400, 0.025)
