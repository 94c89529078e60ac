"""The benchmarks on growing: hosts on several splits, two-level intervals, pages and verdicts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.karn.intervals import Estimate, interval
from esper.runtime.tasks import find
from esper_lab.evaluation import LOOKING, Evaluation, Rung
from esper_lab.plans import NEVER, PlannedSeed, library
from esper_lab.plans import Plan as PlanOfLibrary
from esper_lab.worth import read_worth

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RULES = (
    *("never grow", "everything at step 0", "best fixed schedule", "lookup on static features"),
    *("one look", "trigger", "tree", "forest", "try and keep"),
)


pytestmark = pytest.mark.usefixtures("scripts_on_path")


def rung(name: str, utility: Any, policy: bool = False, chosen: Any = None) -> Rung:
    values = np.asarray(utility, float)
    return Rung(
        name, policy, values.tolist(), (values + 0.01).tolist(), [3.0] * len(values), chosen
    )


def evaluation(hosts: int = 12, suite: str = "digits", best: float = 0.3) -> Evaluation:
    """Controls of known utility; of the rules, ``tree`` is best."""
    draws = np.random.default_rng(0).normal(0.5, 0.05, hosts)
    rungs = [
        rung(name, draws + (best if name == "tree" else 0.01 * i), chosen=[1] * hosts)
        for i, name in enumerate(RULES)
    ]
    rungs.append(rung("clairvoyant per host", draws + 0.4, chosen=[1] * hosts))
    rungs.append(rung("never grow, tuned", draws + 0.03))
    rungs.append(rung("static network of three times the size", draws + 0.35))
    splits = [1 + 4 * host // hosts for host in range(hosts)]
    return Evaluation("rule", suite, 24, [suite] * hosts, ["never", "one"], rungs, splits)


SPLITS = [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def policies(above_never: list[float], hosts: int = 12) -> list[list[Rung]]:
    """Rungs of one policy for each gain; its misled twins and copies are a point worse."""
    never = np.array(evaluation(hosts).rungs[0].utility)
    draws = np.random.default_rng(1).normal(0.0, 0.02, (len(above_never), hosts))
    return [
        [
            rung(f"{variant}, {way}", never + gain + noise - loss, variant == "policy")
            for way in ("greedy", "sampled")
            for variant, loss in (("policy", 0.0), ("misled twin", 0.01), ("yoked copy", 0.01))
        ]
        for gain, noise in zip(above_never, draws, strict=True)
    ]


@pytest.mark.parametrize(("policies", "groups"), [(3, 8), (5, 24), (24, 24)])
@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (2.0, 0.3, 1.0), (0.0, 1.0, 1.0)], ids=str)
def test_two_levels_contain_the_mean_over_policies_and_groups(policies, groups, shares) -> None:
    from policy_intervals import two_levels

    def covered(estimate: Estimate) -> float:
        return float(((estimate.low <= 0.0) & (estimate.high >= 0.0)).mean())

    generator = np.random.default_rng(7)
    policy, group, rest = shares
    values = policy * generator.normal(size=(1000, policies, 1))
    values = values + group * generator.normal(size=(1000, 1, groups))
    values = values + rest * generator.normal(size=(1000, policies, groups))
    found = covered(two_levels(values))
    assert 0.92 < found <= 1.0
    if policy > group:
        assert found < 0.98  # not merely wide
        assert covered(interval(values.mean(1))) < 0.6  # one level is too narrow


def test_intervals_of_policies_have_two_levels() -> None:
    from ladders import over_controllers
    from policy_intervals import two_levels

    values = np.random.default_rng(2).normal(0.1, 0.05, (3, 12))
    values += np.array([[0.0], [0.2], [0.4]])
    by_split = values.reshape(3, 4, 3).mean(2)
    found, wanted = over_controllers(values, SPLITS), two_levels(100.0 * by_split)
    assert found == pytest.approx((wanted.mean, wanted.low, wanted.high))
    hosts_alone = interval(100.0 * by_split.mean(0)[None])
    assert found[2] - found[1] > 2.0 * (hosts_alone.high - hosts_alone.low)[0]
    one = interval(100.0 * by_split[:1])
    assert over_controllers(values[:1], SPLITS) == pytest.approx(
        (one.mean[0], one.low[0], one.high[0])
    )


@pytest.mark.parametrize(
    ("gains", "wanted"),
    [
        ([0.40, 0.41, 0.42, 0.39], "above"),
        ([0.10, 0.11, 0.12, 0.09], "below"),
        ([0.10, 0.50, 0.45, 0.15], "neither above nor below"),
    ],
)
def test_the_page_says_where_the_policy_stands(gains: list[float], wanted: str) -> None:
    from ladders import standing, standing_text

    found = standing("sampled", policies(gains), evaluation())
    assert found.rule == "tree"
    assert found.gain[0] == pytest.approx(100 * np.mean(gains), abs=1.0)
    assert found.above_rule[0] == pytest.approx(found.gain[0] - 30.0, abs=1e-6)
    assert found.network == "static network of three times the size"
    assert found.above_network == pytest.approx(tuple(x - 5.0 for x in found.above_rule))
    assert found.above_misled == pytest.approx((1.0, 1.0, 1.0))
    assert found.validation_gain == pytest.approx(found.gain)
    assert found.by_controller == pytest.approx([100 * gain for gain in gains], abs=2.0)
    text = standing_text(found, len(gains))
    assert f"the policy is {wanted} the best rule (tree): {found.above_rule[0]:+.1f} [" in text
    assert "above its misled twin (+1.0 [+1.0, +1.0])" in text
    assert f"(static network of three times the size): {found.above_network[0]:+.1f} [" in text


def test_the_clairvoyant_and_plans_chosen_per_task_are_no_rules() -> None:
    from ladders import best_of, best_rule

    found = evaluation(best=0.0)
    found.rungs.append(rung("best plan per task", [2.0] * 12))
    assert best_rule(found).name == "try and keep"
    looking = best_of(found, LOOKING[:1])
    assert looking is not None
    assert looking.name == "one look"
    assert best_of(found, ["full tuning"]) is None


def test_a_page_of_a_suite_has_every_control_and_every_policy() -> None:
    from suite import target_page

    found = evaluation()
    found.tasks[:] = ["digits", "digits_mlp"] * 6
    page, figures = target_page("digits", found, policies([0.4, 0.41]))
    text = "\n\n".join(page)
    for name in (*RULES, "clairvoyant per host", "**policy, greedy**", "**policy, sampled**"):
        assert f"| {name} |" in text
    assert "| gain of each policy | 1 | 2 |" in text
    assert "| `digits_mlp` |" in text
    assert (figures["hosts"], figures["splits"]) == (12, 4)
    written = json.loads(json.dumps(figures))
    gain = written["policies"]["sampled"]["gain"]
    assert f"{gain[0]:+.1f} [{gain[1]:+.1f}, {gain[2]:+.1f}]" in text
    assert written["controls"]["tree"]["gain"] == pytest.approx([30.0] * 3)


def test_a_kept_policy_is_not_played_again(tmp_path: Path) -> None:
    from suite import played

    stored = tmp_path / "kept.json"
    rungs = [
        {"name": "policy, greedy", "policy": True, "chosen": None}
        | {name: [0.5] for name in ("utility", "validation", "added")}
    ]
    stored.write_text(json.dumps(rungs))
    found = played(None, [], 1, stored)
    assert found == [Rung("policy, greedy", True, [0.5], [0.5], [0.5])]


def test_a_plan_is_described_as_it_is_played() -> None:
    from tasks import words

    task = find("digits_shift")
    seeds = (PlannedSeed(1.0, 1.0, 0.5, style=0, tempo=2), PlannedSeed(0.0, 0.0, 0.0))
    text = words(PlanOfLibrary("two", seeds), task)
    first, second = text.split("), ")
    assert first.startswith("norm in r0c0 from step 0 (")
    assert second.startswith("conv_heavy in r0c1 from step 20 (")
    assert words(NEVER, task) == "never"


def test_figures_of_a_task_go_to_page_and_listing(tmp_path: Path) -> None:
    from tasks import figures_of, page, shipped

    found = {"digits": figures_of(evaluation(), library())}
    own = found["digits"]
    assert (own["hosts"], own["splits"], own["looking"]) == (12, 4, "tree")
    text = "\n".join(page(found, ["digits"]))
    assert "+30.0 [+30.0, +30.0] v +30.0 (tree)" in text
    assert "+2.0 [+2.0, +2.0] v +2.0 |" in text
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"tasks": shipped(found)}))
    worth = read_worth(table)["digits"]
    assert worth.gain == pytest.approx((2.0, 2.0, 2.0))
    assert worth.schedule == own["schedule"]
    assert (worth.network, worth.network_gain) == (
        "static network of three times the size",
        pytest.approx(35.0),
    )
    assert "| -33.0 [-33.0, -33.0] (static network of three times the size) |" in text
    assert own["schedule"] in text
