"""Paired differences of a policy from its opponents against numpy, and what either cost."""

import msgspec
import numpy as np
import pytest
from scipy import stats

from esper_lab.evaluation import Rung
from esper_lab.ladder_figures import ladder_tables
from esper_lab.ladder_steps import budget_text, differences, differences_text
from tiny_population import evaluation_of

HOSTS = 12
DRAWS = np.random.default_rng(0)
LEVELS = {
    "never grow": 0.40, "best fixed schedule": 0.50, "forest": 0.55, "full tuning": 0.70,
    "Auto-RGN": 0.65, "full tuning of a copy": 0.90, "best plan per task": 0.95,
    "clairvoyant per host": 0.99, "policy, greedy": 0.56, "misled twin, greedy": 0.56,
    "yoked copy, greedy": 0.50, "policy, sampled": 0.60, "misled twin, sampled": 0.50,
    "yoked copy, sampled": 0.65,
}  # fmt: skip
"""Mean utility; hosts differ much, and rungs on one host little."""
OF_HOSTS = DRAWS.normal(0.0, 0.2, HOSTS)


def rung(name: str, level: float) -> Rung:
    values = (level + OF_HOSTS + DRAWS.normal(0.0, 0.02, HOSTS)).tolist()
    chosen = [0] * HOSTS if name.startswith("clair") else None
    return Rung(name, name.startswith("policy"), values, values, values, chosen)


FOUND = evaluation_of(
    [rung(name, level) for name, level in LEVELS.items()], rule_episodes=7936, policy_episodes=896
)
NAMED = {one.name: np.array(one.utility) for one in FOUND.rungs}
EXPECTED = [
    ("policy, greedy", "rule", "forest", "neither above nor below"),
    ("policy, greedy", "training", "full tuning", "below"),
    ("policy, greedy", "misled", "misled twin, greedy", "neither above nor below"),
    ("policy, greedy", "yoked", "yoked copy, greedy", "above"),
    ("policy, sampled", "rule", "forest", "above"),
    ("policy, sampled", "training", "full tuning", "below"),
    ("policy, sampled", "misled", "misled twin, sampled", "above"),
    ("policy, sampled", "yoked", "yoked copy, sampled", "below"),
]


def test_differences_are_paired_by_host_and_from_the_best_of_a_kind():
    found = differences(FOUND)
    assert [(one.policy, one.kind, one.opponent, one.verdict) for one in found] == EXPECTED
    for one in found:
        values = 100 * (NAMED[one.policy] - NAMED[one.opponent])
        half = stats.t.ppf(0.975, HOSTS - 1) * stats.sem(values)
        expected = values.mean(), values.mean() - half, values.mean() + half
        assert (one.mean, one.low, one.high) == pytest.approx(expected)
        assert half < 3.0


def test_every_way_of_acting_has_its_sentences_and_they_say_what_the_numbers_say():
    text = differences_text(FOUND)
    sentences = text.split(". ")
    assert len(sentences) == 4
    assert sentences[0].startswith("With greedy actions the policy is neither above nor below the ")
    assert sentences[2].startswith(
        "With sampled actions the policy is above the best rule (forest)"
    )
    first, second, third, fourth = differences(FOUND)[4:]

    def shown(one: object) -> str:
        return f"by {one.mean:+.1f} [{one.low:+.1f}, {one.high:+.1f}]"

    assert text.endswith(
        f"is above the best rule (forest), {shown(first)}, and below the best network that does "
        f"not grow (full tuning), {shown(second)} points. It is above its misled twin, "
        f"{shown(third)}, and below its yoked copy, {shown(fourth)} points."
    )


def test_a_control_has_no_twin_and_the_controls_alone_have_no_differences():
    rungs = [one for one in FOUND.rungs if "," not in one.name]
    alone = msgspec.structs.replace(FOUND, rungs=rungs)
    assert differences(alone) == []
    assert differences_text(alone) == ""
    heuristic = rung("policy, heuristic", 0.2)
    with_control = msgspec.structs.replace(FOUND, rungs=[*rungs, heuristic])
    assert [one.kind for one in differences(with_control)] == ["rule", "training"]
    text = differences_text(with_control)
    assert text.startswith("The policy is below the best rule (forest), by -")
    assert "twin" not in text


def test_budgets_are_shown_where_they_are_known():
    text = budget_text(FOUND)
    assert text == "Rules were searched over 7,936 episodes, the policy was trained on 896."
    changed = msgspec.structs.replace
    assert budget_text(changed(FOUND, policy_episodes=0)).endswith("was trained on none.")
    assert budget_text(changed(FOUND, policy_episodes=None)).endswith("over 7,936 episodes.")
    assert budget_text(changed(FOUND, rule_episodes=None)) == ""


def test_the_report_says_the_same():
    text = ladder_tables(FOUND)[0].text
    assert differences_text(FOUND) in text
    assert budget_text(FOUND) in text
