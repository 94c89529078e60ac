"""Policies that look against the best rule of two families, taken together.

    python benchmarks/policy_suite.py --write          # after policy.py of every family; a minute

Reads the finished stages of ``policy.py``, and plays what is missing.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from branches import BRANCHINGS
from ladders import Floats, Splits, best_rule, over_controllers
from policy import controls_of, placed
from policy_further import FURTHER, further_and_clairvoyant, further_splits, ladder_hosts, work_of
from policy_page import SHARE, best_rule_of, share_of_way
from reporting import made_on, new_parser, publish, table

from esper_lab.evaluation import CLAIRVOYANT
from esper_lab.ladder_steps import Points, points_text

CONTROLLERS = range(1, 9)


@dataclass(frozen=True, slots=True)
class Against:
    """K controllers against the best rule on the same H hosts.

    Attributes:
        rule: its name.
        above: utility above it, ``[K, H]``.
        above_share: utility above ``share_of_way``, ``[K, H]``.
        splits: the split of each host.
    """

    rule: str
    above: Floats
    above_share: Floats
    splits: Splits


def on_ladder(runs: dict[int, Path], family: str, work: Path) -> Against:
    """On the draws of the ladder."""
    found = controls_of(family, 1)
    _, hosts = ladder_hosts(family, 1)
    rule = best_rule(found)
    (plan,) = (rung for rung in found.rungs if rung.name == CLAIRVOYANT)
    own = []
    for seed, run in runs.items():
        rungs = placed(run, seed, hosts.fresh, 1, work)
        own += [rung.utility for rung in rungs if rung.name == "policy, greedy"]
    return _against(rule.name, own, rule.utility, plan.utility, found.splits)


def on_further(runs: dict[int, Path], family: str, work: Path) -> Against:
    """On the further draws."""
    _, hosts = ladder_hosts(family, 1)
    played = further_and_clairvoyant(runs, family, hosts.training, work)
    rule = best_rule_of(played)
    own = [played[str(seed)] for seed in runs]
    return _against(rule, own, played[rule], played[CLAIRVOYANT], further_splits(len(FURTHER)))


def _against(
    name: str, own: list[list[float]], rule: list[float], plan: list[float], splits: Splits
) -> Against:
    policies, best = np.array(own), np.array(rule)
    wanted = share_of_way(best, np.array(plan))
    return Against(name, policies - best, policies - wanted, splits)


def together(found: dict[str, Against]) -> dict[str, Points]:
    """Points above the best rules and above the share of the way, means over the families.

    Families share their splits in order, and controllers are independent of each other. With few
    splits, errors that cancel between families by chance make that interval too narrow, so the one
    of independent families is reported where it is wider.
    """
    splits = next(iter(found.values())).splits
    means = {}
    for name in ("above", "above_share"):
        families = [getattr(one, name) for one in found.values()]
        shared = over_controllers(np.mean(families, 0), splits)
        own = independent_mean([over_controllers(one, splits) for one in families])
        means[name] = max(shared, own, key=lambda points: points[2] - points[1])
    return means


def independent_mean(families: list[Points]) -> Points:
    """Mean of independent means, with the interval that their errors give together."""
    mean = sum(one[0] for one in families) / len(families)
    half = math.hypot(*((one[2] - one[1]) / 2 for one in families)) / len(families)
    return mean, mean - half, mean + half


def main() -> int:
    """Read the stages and publish the page; return the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--works", type=Path, nargs="+", help="a folder for each family")
    arguments = parser.parse_args()
    places = arguments.works or [None] * len(BRANCHINGS)
    ladder, further = {}, {}
    for family, place in zip(BRANCHINGS, places, strict=True):
        work = work_of(family, place)
        runs = {seed: work / "controllers" / f"controller-{seed}" for seed in CONTROLLERS}
        ladder[family] = on_ladder(runs, family, work)
        further[family] = on_further(runs, family, work)
    hosts = ladder["one_seed"].above.shape[1]
    rows: list[tuple[str, ...]] = []
    figures = {}
    for where, found in (
        (f"{hosts} held-out draws of each family", ladder),
        (f"{len(FURTHER)} further draws of each family", further),
    ):
        for family, one in found.items():
            above = points_text(over_controllers(one.above, one.splits), "+.1f")
            rows.append((where, f"`{family}`", one.rule, above, ""))
        both = together(found)
        figures[where] = {"above_rule": both["above"], "above_share": both["above_share"]}
        texts = (points_text(value, "+.1f") for value in both.values())
        rows.append((where, "**both**", "the best of each", *texts))
    heads = "hosts", "family", "best rule", "policy minus it"
    page = [
        f"{len(CONTROLLERS)} controllers for each family, greedy actions, against the rule that is "
        "best on these very hosts. Points of test utility; both families count the same. Brackets "
        "hold 95 % intervals over controllers and splits of the data; of both families, the wider "
        "of the interval over the splits that they share and the one of independent families. Both "
        "passed the gate of `benchmarks/world.py` in these four splits (in sixteen `adaptation` "
        "does not); on `from_scratch` and `sequences`, which fail it, no controller learned.",
        table((*heads, f"policy minus {SHARE:.0%} of the way to the clairvoyant"), rows),
        f"{made_on()}.",
    ]
    publish("policy_suite", "Over two families", page, arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
