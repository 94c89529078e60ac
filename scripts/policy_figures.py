"""Texts about policies from the committed results, for ``write_figures.py``."""

import json
from pathlib import Path
from typing import Any

from esper_lab.ladder_steps import points_text, verdict


def read(name: str, results: Path) -> Any:
    """Return a result, or None if it is not there."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def policy(results: Path) -> str:
    """Where trained policies stand between the controls."""
    there = {name: read(name, results) for name in ("suite", "adaptation")}
    texts = [one_policy(name, found) for name, found in there.items() if found is not None]
    if there["suite"] is None:
        texts.append("On the training suite this is not measured yet (`make bench-suite`).")
    return f"- **A trained policy against the rules.** {' '.join(texts)}"


def one_policy(trained_on: str, found: dict[str, Any]) -> str:
    """Where the policies that were trained on one suite stand."""
    names = {
        "suite": "the training suite",
        "held_out": "the held-out suite",
        "adaptation": "`adaptation`",
        "adaptation_held_out": "its held-out draws",
    }
    parts = [
        f"{found['policies']} policies were each trained on {names[trained_on]} for "
        f"{found['episodes']:,} episodes."
    ]
    for suite, own in found["fresh"].items():
        one = own["policies"]["sampled"]
        rule = own["controls"][one["rule"]]["gain"]
        parts.append(
            f"On {own['hosts']} fresh hosts of {names[suite]} they gain {points_text(one['gain'])} "
            "points of test utility above the never-grow twin of the same recipe "
            f"({one['validation_gain'][0]:+.1f} on validation); the best rule there, "
            f"*{one['rule']}*, gains {points_text(rule)}. With sampled actions the policy is "
            f"**{verdict(one['above_rule'])}** that rule, by {points_text(one['above_rule'])}, "
            f"{verdict(one['above_misled'])} its misled twin, by "
            f"{points_text(one['above_misled'])}, "
            f"and **{verdict(one['above_network'])}** the best network that does not grow "
            f"(*{one['network']}*), by {points_text(one['above_network'])}."
        )
    return f"{' '.join(parts)} ([results](benchmarks/results/{trained_on}.md))"


LOOKING = {
    "policy": "**A policy that looks.** {} policies learned from recorded branches of `one_seed`, "
    "where one seed may live.",
    "policy_adaptation": "**The same where several seeds may live.** {} policies learned from "
    "recorded branches of `adaptation`.",
}
"""How the text about the policies of a page begins."""
UNMEASURED = "- **A policy that looks** is not measured yet in this version (`make bench-policy`)."


def looking_pages(results: Path) -> dict[str, dict[str, Any]]:
    """The results of ``LOOKING`` that are there, by name."""
    there = {name: read(name, results) for name in LOOKING}
    return {name: found for name, found in there.items() if found is not None}


def best_rule(comparison: dict[str, Any]) -> str:
    """Name of the rule with the highest gain."""
    return max(comparison["rules"], key=lambda name: comparison["rules"][name][0])


def looking(results: Path) -> str:
    """What policies gain that learned from branches, above every rule."""
    texts = [one_looking(name, found) for name, found in looking_pages(results).items()]
    if not texts:
        return UNMEASURED
    suite = read("policy_suite", results)
    if suite is not None:
        parts = "; ".join(
            f"on {where} {points_text(one['above_rule'])}, **{verdict(one['above_rule'])}**"
            for where, one in suite.items()
        )
        texts.append(
            "- **On average over both families**, the controllers of each minus its best rule: "
            f"{parts}. ([results](benchmarks/results/policy_suite.md))"
        )
    return "\n".join(texts)


def one_looking(page: str, found: dict[str, Any]) -> str:
    """What the policies of a page gain."""
    one = found["policies"]["greedy"]
    parts = [
        f"- {LOOKING[page].format(len(one['by_controller']))} On {found['hosts']} held-out hosts "
        f"they gain {points_text(one['gain'])} points above never growing and are "
        f"**{verdict(one['above_rule'])}** the best rule (*{one['rule']}*), by "
        f"{points_text(one['above_rule'])}, which is {found['share_of_gap']['greedy']:.0%} of the "
        "way to a clairvoyant. They are "
        f"{verdict(one['above_misled'])} their misled twins, by "
        f"{points_text(one['above_misled'])}, "
        f"{verdict(one['above_yoked'])} yoked copies, by {points_text(one['above_yoked'])}, "
        f"and **{verdict(one['above_network'])}** the best network that does not grow "
        f"(*{one['network']}*), by {points_text(one['above_network'])}."
    ]
    for family, other in found["comparisons"].items():
        rule = best_rule(other)
        further = "share_of_gap" in other
        parts.append(
            f"On {other['hosts']} {'further' if further else 'new'} hosts of "
            f"`{family}` they are {verdict(other['above'][rule])} the best rule there (*{rule}*), "
            f"by {points_text(other['above'][rule])}"
            + (f", {other['share_of_gap']:.0%} of the way." if further else ".")
        )
    return f"{' '.join(parts)} ([results](benchmarks/results/{page}.md))"


def what_shifts(results: Path) -> str:
    """What the policies have learned, by what shifts: a table."""
    branches, policies = (read(name, results) for name in ("policy_diagnosis", "policy"))
    if branches is None or policies is None:
        return "What they learned is not measured yet in this version."
    kinds = branches["kinds"]
    total = sum(kind["hosts"] for kind in kinds.values())
    rows = [
        (
            one["kind"],
            f"{kinds[one['kind']]['hosts'] / total:.0%}",
            f"{kinds[one['kind']]['hindsight']:+.1f}",
            f"{kinds[one['kind']]['forest'][0]:+.1f}",
            f"{one['difference']:+.1f} ± {one['error']:.1f}",
        )
        for one in policies["kinds"]
    ]
    heads = (
        "what shifts",
        "share of the hosts",
        "best branch in hindsight",
        "forest's choice",
        "policy above the best rule, on further hosts",
    )
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def acting(results: Path) -> str:
    """What policies learn that act while they learn."""
    found = read("policy_online", results)
    if found is None:
        return "- **What acting teaches** is not measured yet in this version."
    scratch, warm = found["scratch"], found["warm"]
    name, first = next(iter(scratch.items()))
    curve = ", ".join(
        f"{points_text(value)} after {int(count):,}" for count, value in first["above"].items()
    )
    budget = min(max(map(int, one["above"])) for one in scratch.values())
    others = ", ".join(
        f"{points_text(one['above'][str(budget)])} ({other})"
        for other, one in scratch.items()
        if other != name
    )
    started = ", ".join(
        f"{points_text(next(reversed(one['above'].values())))} ({other})"
        for other, one in warm.items()
    )
    shipped = points_text(found["references"]["`keep-or-move`"])
    return (
        "- **What acting teaches.** From random weights PPO learns the best fixed schedule: in "
        f"points above it, it is at {curve} episodes. After {budget:,} episodes other settings "
        f"are at {others}. Started from `keep-or-move`, which is {shipped} above the schedule, PPO "
        f"is at {started} after {max(map(int, next(iter(warm.values()))['above'])):,} episodes. "
        "One controller each ([results](benchmarks/results/policy_online.md))."
    )
