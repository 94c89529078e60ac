"""The page of ``policy.py``: what eight controllers gain, and what above every rule."""

from dataclasses import asdict
from typing import Any

import numpy as np
from branch_learning import learning
from branches import BRANCHINGS
from ladders import (
    Floats,
    Standing,
    control_figures,
    ladder_table,
    over_controllers,
    standing,
    standing_text,
)
from policy_further import (
    FURTHER,
    FURTHER_SPLITS,
    LATER_DRAWS,
    LATER_TRAINING,
    Played,
    further_splits,
)
from reporting import table
from what_shifts import KINDS, what_shifts

from esper.runtime.tasks import FAMILIES
from esper_lab.evaluation import CLAIRVOYANT, Evaluation, Rung
from esper_lab.ladder_steps import headroom_text, points, points_text, steps

WAYS = "greedy", "sampled"
SHARE = 0.4
"""Share of the gap between the best rule and the clairvoyant that a policy should close."""


def rules_of(played: Played) -> list[str]:
    """Names of the rules."""
    others = ("never", CLAIRVOYANT)
    return [name for name in played if name not in others and not name.isdecimal()]


def best_rule_of(played: Played) -> str:
    """Name of the rule with the highest mean utility."""
    return max(rules_of(played), key=lambda rule: float(np.mean(played[rule])))


def share_of_way(rule: Floats, plan: Floats) -> Floats:
    """The utility ``SHARE`` of the way from a rule to the clairvoyant, of each host ``[H]``.

    Linear in the utilities, unlike the share that a policy closes.
    """
    return rule + SHARE * (plan - rule)


def compared(played: Played, seeds: list[int]) -> dict[str, Any]:
    """Gains, and differences between the controllers and every rule, in points."""
    hosts = len(played["never"])
    splits = further_splits(hosts)
    never, own = np.array(played["never"]), np.array([played[str(seed)] for seed in seeds])
    rules = {rule: np.array(played[rule]) for rule in rules_of(played)}
    found: dict[str, Any] = {
        "hosts": hosts,
        "gain": over_controllers(own - never, splits),
        "rules": {rule: points(values - never, splits) for rule, values in rules.items()},
        "above": {rule: over_controllers(own - values, splits) for rule, values in rules.items()},
        "above_each": {
            rule: (100.0 * (own - values).mean(1)).tolist() for rule, values in rules.items()
        },
    }
    if CLAIRVOYANT in played:
        best, plan = rules[best_rule_of(played)], np.array(played[CLAIRVOYANT])
        found["clairvoyant"] = points(plan - never, splits)
        found["above_clairvoyant"] = over_controllers(own - plan, splits)
        found["share_of_gap"] = float((own - best).mean() / (plan - best).mean())
        found["above_share"] = over_controllers(own - share_of_way(best, plan), splits)
    return found


def comparison_table(family: str, found: dict[str, Any]) -> str:
    """Gains of the rules and of the policy, and what the policy has above each rule."""
    rows = [
        (rule, points_text(gain, "+.1f"), points_text(found["above"][rule], "+.1f"))
        for rule, gain in found["rules"].items()
    ]
    rows.append(("**policy**", points_text(found["gain"], "+.1f"), ""))
    if "clairvoyant" in found:
        gain, above = found["clairvoyant"], found["above_clairvoyant"]
        rows.append((CLAIRVOYANT, points_text(gain, "+.1f"), points_text(above, "+.1f")))
    return table((f"`{family}`, {found['hosts']} hosts", "gain", "policy minus it"), rows)


def by_kind(played: Played, family: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Gains of the policy and of the best rule on the further draws, by what shifts."""
    draw = FAMILIES[family].draw
    kinds = np.array([what_shifts(draw(number)) for number in FURTHER])
    never, own = np.array(played["never"]), np.array([played[str(seed)] for seed in seeds]).mean(0)
    rule = np.array(played[best_rule_of(played)])
    found = []
    for kind in KINDS:
        chosen = kinds == kind
        difference = 100.0 * (own - rule)[chosen]
        found.append(
            {
                "kind": kind,
                "hosts": int(chosen.sum()),
                "rule": 100.0 * float((rule - never)[chosen].mean()),
                "policy": 100.0 * float((own - never)[chosen].mean()),
                "difference": float(difference.mean()),
                "error": float(difference.std() / len(difference) ** 0.5),
                "worse": float((own < never - 0.01)[chosen].mean()),
            }
        )
    return found


def kind_table(found: list[dict[str, Any]]) -> str:
    """``by_kind`` as a table."""
    rows = [
        (
            one["kind"],
            one["hosts"],
            f"{one['rule']:+.1f}",
            f"{one['policy']:+.1f}",
            f"{one['difference']:+.1f} ± {one['error']:.1f}",
            f"{one['worse']:.0%}",
        )
        for one in found
    ]
    heads = "what shifts", "hosts", "gain of the best rule", "gain of the policy", "difference"
    return table((*heads, "hosts a point or more below never growing"), rows)


def share_of_gap(found: Evaluation, policies: list[list[Rung]], way: str) -> float:
    """Share of the gap between the best rule and the clairvoyant that the policies close."""
    one = standing(way, policies, found)
    by_name = {rung.name: np.mean(rung.utility) for rung in found.rungs}
    gap = 100.0 * (by_name[CLAIRVOYANT] - by_name[one.rule])
    return float(one.above_rule[0] / gap)


def learning_text(family: str, controllers: int, recorded: int) -> str:
    """How the controllers learned, and how they are scored."""
    branching = BRANCHINGS[family]
    members = len(branching.branches)
    settings = ", ".join(f"{name} {value}" for name, value in learning(branching).items())
    return (
        f"{controllers} controllers learned from {recorded * members:,} recorded episodes of "
        f"{recorded:,} training draws of `{family}` ({settings}). In each group of {members} "
        f"episodes {branching.words.format(delay=branching.delay)}. The recorder knows when the "
        "shift comes; the controllers are not told, and have met no draw on which they are scored. "
        "All figures are points of utility on the test split. Brackets hold 95 % intervals over "
        "controllers and splits of the data."
    )


def ladder_section(
    found: Evaluation, standings: list[Standing], shares: dict[str, float], controllers: int
) -> list[str]:
    """The controllers among the controls of the ladder."""
    return [
        f"## On the {len(found.tasks)} held-out draws of the ladder",
        ladder_table(steps(found), standings),
        *(standing_text(one, controllers) for one in standings),
        "Of the gap between the best rule and the clairvoyant, whose plans begin before anything "
        f"can be observed, greedy actions close {shares['greedy']:.0%} and sampled actions "
        f"{shares['sampled']:.0%}.",
        headroom_text(found),
    ]


def further_section(
    found: Evaluation, differences: dict[str, dict[str, Any]], kinds: list[dict[str, Any]]
) -> list[str]:
    """The controllers and the rules on draws beyond the ladder, and on later families."""
    own = differences[found.suite]
    return [
        f"## On {len(FURTHER)} further draws, and on three families made afterwards",
        f"In {len(FURTHER_SPLITS)} splits. The hosts and shifts of the families "
        "(`benchmarks/later_tasks.py`) were made when an earlier policy of `one_seed`, whose early "
        "seed was small, was frozen; their episodes are those of the family above. The early seeds "
        "of these policies were chosen on training draws, and all draws of this section are new; "
        f"of each family there are {LATER_DRAWS}. Rules were tuned on {found.training_hosts} "
        f"training draws of `{found.suite}` and on {LATER_TRAINING} of each later family, "
        "those that try seeds on training draws alone. The controllers act greedily.",
        *(comparison_table(family, one) for family, one in differences.items()),
        f"On the further draws of `{found.suite}` the policies close "
        f"{own['share_of_gap']:.0%} of the gap between the best rule and the clairvoyant; they "
        f"are {points_text(own['above_share'], '+.1f')} points above {SHARE:.0%} of it.",
        f"On the further draws of `{found.suite}`, by what shifts (standard errors over hosts; "
        "means over controllers):",
        kind_table(kinds),
    ]


def controllers_section(
    standings: list[Standing], select: dict[int, float], best: int, selected: int
) -> list[str]:
    """Gains of each controller, and which one is selected.

    Args:
        standings: the controllers among the controls, by ``WAYS``.
        select: validation utility of each controller on the draws of the selection, in points.
        best: the selected controller.
        selected: number of those draws.
    """
    heads = "controller", "greedy", "sampled", "validation utility, selection draws"
    rows = [
        (
            f"{seed}{' (selected)' if seed == best else ''}",
            *(f"{one.by_controller[i]:+.1f}" for one in standings),
            f"{utility:.1f}",
        )
        for i, (seed, utility) in enumerate(select.items())
    ]
    return [
        "## Each controller",
        table(heads, rows),
        "Gains over never growing on the draws of the ladder. The selected controller has the "
        f"highest validation utility on {selected} draws that are neither recorded nor scored.",
    ]


def result_page(
    found: Evaluation,
    policies: list[list[Rung]],
    chosen: dict[int, list[float]],
    more: dict[str, Played],
    recorded: int,
) -> tuple[list[str], dict[str, Any]]:
    """The paragraphs and the figures.

    Args:
        found: the controls on the hosts of the ladder.
        policies: the rungs of each controller on them.
        chosen: validation utility of each controller on the draws of the selection.
        more: see ``policy_further.everywhere``.
        recorded: number of draws that were recorded.
    """
    standings = [standing(way, policies, found) for way in WAYS]
    shares = {way: share_of_gap(found, policies, way) for way in WAYS}
    differences = {family: compared(played, list(chosen)) for family, played in more.items()}
    kinds = by_kind(more[found.suite], found.suite, list(chosen))
    select = {seed: 100.0 * float(np.mean(values)) for seed, values in chosen.items()}
    best = max(select, key=lambda seed: select[seed])
    page = [
        learning_text(found.suite, len(chosen), recorded),
        *ladder_section(found, standings, shares, len(chosen)),
        *further_section(found, differences, kinds),
        *controllers_section(standings, select, best, len(chosen[best])),
    ]
    figures = {
        "hosts": len(found.tasks),
        "splits": len(set(found.splits)),
        "controls": control_figures(found),
        "policies": {one.way: asdict(one) for one in standings},
        "share_of_gap": shares,
        "comparisons": differences,
        "kinds": kinds,
        "selection": select,
        "selected": best,
    }
    return page, figures
