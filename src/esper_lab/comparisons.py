"""A policy against its opponents on the same hosts, and what either cost to find."""

from collections.abc import Sequence

import numpy as np

from esper_lab.evaluation import RULES, WITHOUT_GROWING, Difference, Evaluation, best_rung
from esper_lab.ladder_steps import points, points_text, verdict

OPPONENTS = {
    "rule": "the best rule",
    "training": "the best network that does not grow",
    "blind": "its blind twin",
    "yoked": "its yoked copy",
}
"""The opponents of a policy by the kind of their difference."""
_BEST_OF = "rule", "training"
"""Opponents that are the best of their kind on these hosts."""


def differences(evaluation: Evaluation) -> list[Difference]:
    """The paired differences of every rung of the policy from every opponent that is there."""
    rows = []
    for rung in evaluation.rungs:
        if not rung.policy:
            continue
        way = rung.name.partition(", ")[2]
        names: dict[str, Sequence[str]] = {
            "rule": RULES,
            "training": WITHOUT_GROWING,
            "blind": [f"blind twin, {way}"],
            "yoked": [f"yoked copy, {way}"],
        }
        for kind in OPPONENTS:
            opponent = best_rung(evaluation.rungs, names[kind])
            if opponent is not None:
                value = points(np.subtract(rung.utility, opponent.utility), evaluation.splits)
                rows.append(Difference(rung.name, kind, opponent.name, *value, verdict(value)))
    return rows


def differences_text(evaluation: Evaluation) -> str:
    """Say in a sentence or two for every rung of the policy where it stands."""
    rows = differences(evaluation)
    sentences = []
    for name in dict.fromkeys(one.policy for one in rows):
        way = name.partition(", ")[2]
        start = f"With {way} actions the" if way in ("greedy", "sampled") else "The"
        policy_rows = [one for one in rows if one.policy == name]
        for subject, kinds in ((f"{start} policy", _BEST_OF), ("It", ("blind", "yoked"))):
            parts = [_clause(one) for one in policy_rows if one.kind in kinds]
            if parts:
                sentences.append(f"{subject} is {', and '.join(parts)} points.")
    return " ".join(sentences)


def _clause(one: Difference) -> str:
    opponent = OPPONENTS[one.kind]
    if one.kind in _BEST_OF:
        opponent = f"{opponent} ({one.opponent})"
    return f"{one.verdict} {opponent}, by {points_text((one.mean, one.low, one.high), '+.1f')}"


def budget_text(evaluation: Evaluation) -> str:
    """Say over how many episodes rules were searched and the policy was trained."""
    if evaluation.rule_episodes is None:
        return ""
    text = f"Rules were searched over {evaluation.rule_episodes:,} episodes"
    if evaluation.policy_episodes is None:
        return f"{text}."
    episodes = f"{evaluation.policy_episodes:,}" if evaluation.policy_episodes else "none"
    return f"{text}, the policy was trained on {episodes}."
