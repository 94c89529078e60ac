"""Policies that look against the best rule of every family that passes the gate, taken together.

    python benchmarks/policy_suite.py --write          # after policy.py of every family; a minute

Plays nothing: it reads the finished stages of ``policy.py``.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from branches import BRANCHINGS
from ladders import Floats, Splits, best_rule
from policy import controls_of
from policy_further import FURTHER, FURTHER_SPLITS, Played, work_of
from policy_page import SHARE, rules_of
from reporting import made_on, new_parser, publish, table

from esper.karn.intervals import two_levels
from esper.karn.ladder import Points, points_text, units
from esper.leyline.evaluation import CLAIRVOYANT, Rung

CONTROLLERS = range(1, 9)


@dataclass(frozen=True, slots=True)
class Against:
    """K controllers against the best rule on the same hosts.

    Attributes:
        rule: its name.
        above: points above it in each of U splits, ``[K, U]``.
        above_share: points above ``SHARE`` of the way from it to the clairvoyant, ``[K, U]``.
    """

    rule: str
    above: Floats
    above_share: Floats


def over(values: Iterable[Floats]) -> Points:
    """The mean over families of ``values [K, U]``, points of K controllers in U splits each.

    Families share their splits, and controllers are independent of each other.
    """
    found = two_levels(np.mean(list(values), axis=0))
    return float(found.mean), float(found.low), float(found.high)


def on_ladder(family: str, work: Path) -> Against:
    """On the draws of the ladder."""
    found = controls_of(family, 1)
    rule = best_rule(found)
    (plan,) = (rung for rung in found.rungs if rung.name == CLAIRVOYANT)
    own = []
    for seed in CONTROLLERS:
        rungs = msgspec.json.decode((work / f"rungs-{seed}.json").read_bytes(), type=list[Rung])
        own += [rung.utility for rung in rungs if rung.name == "policy, greedy"]
    return _against(rule.name, own, rule.utility, plan.utility, found.splits)


def on_further(work: Path) -> Against:
    """On the further draws."""
    played: Played = {}
    for path in (work / "further").glob("*.json"):
        content = json.loads(path.read_text())
        name = CLAIRVOYANT if path.stem == "best_plans" else path.stem.removeprefix("controller-")
        played |= content if isinstance(content, dict) else {name: content}
    rule = max(rules_of(played), key=lambda name: float(np.mean(played[name])))
    splits = [FURTHER_SPLITS[i % len(FURTHER_SPLITS)] for i in range(len(FURTHER))]
    own = [played[str(seed)] for seed in CONTROLLERS]
    return _against(rule, own, played[rule], played[CLAIRVOYANT], splits)


def _against(
    name: str, own: list[list[float]], rule: list[float], plan: list[float], splits: Splits
) -> Against:
    policies, best, highest = np.array(own), np.array(rule), np.array(plan)
    wanted = best + SHARE * (highest - best)
    return Against(name, *(100.0 * units(policies - one, splits) for one in (best, wanted)))


def main() -> int:
    """Read the stages and publish the page; return the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--works", type=Path, nargs="+", help="a folder for each family")
    arguments = parser.parse_args()
    places = arguments.works or [None] * len(BRANCHINGS)
    works = {
        family: work_of(family, place) for family, place in zip(BRANCHINGS, places, strict=True)
    }
    hosts = {
        f"{len(controls_of('one_seed', 1).tasks)} held-out draws of each family": {
            family: on_ladder(family, work) for family, work in works.items()
        },
        f"{len(FURTHER)} further draws of each family": {
            family: on_further(work) for family, work in works.items()
        },
    }
    rows: list[tuple[str, ...]] = []
    figures = {}
    for where, found in hosts.items():
        for family, one in found.items():
            above = points_text(over([one.above]), "+.1f")
            rows.append((where, f"`{family}`", one.rule, above, ""))
        together = {
            "above_rule": over(one.above for one in found.values()),
            "above_share": over(one.above_share for one in found.values()),
        }
        figures[where] = together
        texts = (points_text(value, "+.1f") for value in together.values())
        rows.append((where, "**both**", "the best of each", *texts))
    heads = "hosts", "family", "best rule", "policy minus it"
    page = [
        f"{len(CONTROLLERS)} controllers for each family, greedy actions, against the rule that is "
        "best on these very hosts. Points of test utility; both families count the same. Brackets "
        "hold 95 % intervals over controllers and splits of the data, which families share. Two "
        "families pass the gate of `benchmarks/world.py`; on `from_scratch` and `sequences`, which "
        "fail it, no controller learned.",
        table((*heads, f"policy minus {SHARE:.0%} of the way to the clairvoyant"), rows),
        f"{made_on()}.",
    ]
    publish("policy_suite", "Over the families that pass the gate", page, arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
