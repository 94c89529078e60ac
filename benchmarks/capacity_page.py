"""How large a network should become: rules, what can be known at best, and what a sceptic runs.

    python benchmarks/capacity_page.py [--write]

Rules are learned on the hosts of ``capacity_home.py`` and played on those of the suite ``capacity``
too. What was played is kept in ``runs/capacity``, and is not played again.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import capacity_home
import numpy as np
import torch
from capacity_looks import LOOKS, TRIALS, WEIGHTS, correlations, trial
from capacity_plays import SHARES, all_outcomes, further, kept_shares, looks, utility
from capacity_rules import (
    Choice,
    Floats,
    Outcomes,
    arrival,
    constant,
    costs,
    forest,
    gains_by_width,
    lookup,
    nothing,
    scores,
)
from reporting import kept, made_on, new_parser, publish, table

from esper.own_models.width_search import TRIAL
from esper_lab.capacity import held_out as held_out_hosts
from esper_lab.capacity.hosts import VALIDATION, Host
from esper_lab.capacity.training import FACTORS

WORK = Path("runs/capacity")
HOSTS, HELD_OUT, FOLDS = 400, 300, 10
FEWEST = 100
"""Samples on test below which a host is left out."""
RULES: dict[str, Callable[[list[Outcomes]], Choice]] = {
    "never widened": lambda _: lambda __: 0,
    "best constant": constant,
    "table of gains by width, minus price (ships)": lookup,
    "forest on shape, samples, classes, steps": partial(forest, nothing),
    "the same, and the scores at arrival": partial(forest, arrival),
}
"""How each rule is learned from hosts."""
STATIC = "static network of the size that it chooses"
RANK_HEADS = "rank correlation with what 8 times adds", "table", "trial", "mean of both"
RULE = next(name for name in RULES if "ships" in name)


def large_enough(host: Host) -> bool:
    """Whether a host has enough samples on test."""
    return len(host.data().x) - host.samples - VALIDATION >= FEWEST


def played(name: str, draw: Callable[[int], Host], count: int) -> list[Outcomes]:
    """The outcomes of all hosts, with those of ``further`` and ``looks``."""
    hosts = []
    for number in range(count):
        host = draw(number)
        if not large_enough(host):
            continue
        one = kept(WORK / name / f"{number}.json", partial(all_outcomes, host))
        more = kept(WORK / f"{name}-further" / f"{number}.json", partial(further, host))
        curves = kept(WORK / f"{name}-looks" / f"{number}.json", partial(looks, host))
        entry = one | {"further": more, "curves": curves}
        if host.trained:
            path = WORK / f"{name}-shares" / f"{number}.json"
            entry["shares"] = kept(path, partial(kept_shares, host))
        hosts.append(entry)
    return hosts


def best_result(host: Outcomes, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result that is best on validation after the price; all trainings are paid anyway."""
    trained = host | {"training_price": 0.0}
    return max(results, key=lambda one: utility(one, trained, "validation"))


def best(host: Outcomes, results: list[dict[str, Any]]) -> float:
    """Utility on test of the result that is best on validation."""
    return utility(best_result(host, results), host)


def clairvoyant(host: Outcomes, count: int | None = None) -> float:
    """The plan that is best on test in one order of the data, in the other order."""
    worth = [[utility(plan, host) for plan in order[:count]] for order in host["plans"]]
    one, two = np.array(worth)
    return float(one[two.argmax()] + two[one.argmax()]) / 2


def choices(
    learn: Callable[[list[Outcomes]], Choice],
    hosts: list[Outcomes],
    others: list[Outcomes],
    further_lessons: Sequence[Outcomes] = (),
) -> list[int]:
    """What a rule takes, learned on ``others``, or cross-validated where these are ``hosts``."""
    folds = [np.arange(len(hosts))]
    if others is hosts:
        folds = np.array_split(np.random.default_rng(0).permutation(len(hosts)), FOLDS)
    result = [0] * len(hosts)
    for rows in folds:
        left = set(rows.tolist()) if others is hosts else set()
        choose = learn([*(o for i, o in enumerate(others) if i not in left), *further_lessons])
        for i in rows:
            result[i] = choose(hosts[i])
    return result


def worth(hosts: list[Outcomes], indices: list[int]) -> Floats:
    """The utilities of choices of factors."""
    pairs = zip(hosts, indices, strict=True)
    return np.array([(scores(host) - costs(host))[index] for host, index in pairs])


def by_rules(
    hosts: list[Outcomes], others: list[Outcomes], further_lessons: list[Outcomes]
) -> dict[str, Floats]:
    """Utilities of ``hosts`` by rule, see ``choices``.

    The rule that ships does not ask whether a host arrives trained: it is learned on
    ``further_lessons``, the hosts of the other kind, as well.
    """
    columns = {}
    for name, learn in RULES.items():
        indices = choices(learn, hosts, others, further_lessons if name == RULE else ())
        columns[name] = worth(hosts, indices)
        if name == RULE:
            pairs = zip(hosts, indices, strict=True)
            static = np.array([utility(host["statics"][index], host) for host, index in pairs])
    return columns | {STATIC: static}


def all_columns(
    hosts: list[Outcomes], others: list[Outcomes], further_lessons: list[Outcomes]
) -> dict[str, Floats]:
    """Utilities by rung, a share for each host; see ``by_rules``."""
    columns = by_rules(hosts, others, further_lessons)
    if not hosts[0]["trained"]:
        short = [best(host, host["further"]["short"]) for host in hosts]
        columns["sweep of five, a fifth of the epochs each"] = np.array(short)
        continued = [
            utility(host["statics"][_argmax(host, host["further"]["short"])], host)
            for host in hosts
        ]
        columns["the same, then the best in full"] = np.array(continued)
    columns["sweep of five, all epochs each"] = np.array([best(h, h["statics"]) for h in hosts])
    columns["clairvoyant, one widening"] = np.array([clairvoyant(h, len(FACTORS)) for h in hosts])
    columns["clairvoyant, all plans"] = np.array([clairvoyant(h) for h in hosts])
    return columns


def _argmax(host: Outcomes, results: list[dict[str, Any]]) -> int:
    return int(np.argmax([utility(one, host, "validation") for one in results]))


def points(values: Floats, form: str = ".1f") -> str:
    """Mean in points and its 95 % interval over hosts."""
    numbers = [100 * float(value) for value in values]
    mean, error = fmean(numbers), 1.96 * stdev(numbers) / math.sqrt(len(numbers))
    return f"{mean:{form}} [{mean - error:{form}}, {mean + error:{form}}]"


def rung_table(groups: dict[str, dict[str, Floats]]) -> str:
    """Utilities of all rungs, and how far the rule is above each."""
    names = list(dict.fromkeys(name for columns in groups.values() for name in columns))
    rows = []
    for name in names:
        row = [name]
        for columns in groups.values():
            if name not in columns:
                row += ["", ""]
                continue
            row.append(points(columns[name]))
            row.append("" if name == RULE else points(columns[RULE] - columns[name], "+.1f"))
        rows.append(row)
    heads = ["", *(text for group in groups for text in (group, "rule − this"))]
    return table(heads, rows)


def tuned_table(groups: dict[str, list[Outcomes]], hosts: list[Outcomes]) -> str:
    """Trained hosts where every arm chooses its rate of four by validation."""
    choose = lookup(hosts)
    rows = []
    for group, members in groups.items():
        for low, high in ((3, 20), (3, 5), (6, 11), (12, 20)):
            part = [host for host in members if low <= host["epochs"] <= high]
            arms: dict[str, list[float]] = {"rule": [], "longer": [], "same": [], "all": []}
            for host in part:
                more, choice = host["further"], choose(host)
                in_place = [host["plans"][0][: len(FACTORS)], *more["in_place"]]
                statics = [host["statics"], *more["statics"]]
                arms["rule"].append(best(host, [row[choice] for row in in_place]))
                arms["longer"].append(best(host, [row[0] for row in in_place]))
                arms["same"].append(best(host, [row[choice] for row in statics]))
                arms["all"].append(best(host, [one for row in statics for one in row]))
            values = {name: np.array(column) for name, column in arms.items()}
            others = (points(values["rule"] - values[n], "+.1f") for n in ("longer", "same", "all"))
            rows.append((group, f"{low} to {high}", len(part), points(values["rule"]), *others))
    heads = (
        "trained hosts", "epochs left", "hosts", "widened in place by the rule", "− trained longer",
        "− static of that size, from scratch", "− best of 20 static (five sizes, four rates)",
    )  # fmt: skip
    return table(heads, rows)


def _tuned(rates: list[list[dict[str, float]]]) -> list[float]:
    """The score of each arm at the rate that is best on validation, from a row for each rate."""
    columns = zip(*rates, strict=True)
    return [max(column, key=lambda one: one["validation"])["test"] for column in columns]


def share_table(groups: dict[str, list[Outcomes]]) -> str:
    """Scores of trained hosts that were shrunk before they were widened, above those widened only.

    Every arm chooses its rate of two by validation.
    """
    names = [f"{share} of the weights kept" for share in SHARES[1:]]
    rows = []
    for group, members in groups.items():
        for low, high in ((3, 20), (3, 5), (6, 11), (12, 20)):
            part = [host["shares"] for host in members if low <= host["epochs"] <= high]
            arms = np.array([_tuned(each) for each in part])
            above = (points(column - arms[:, 0], "+.1f") for column in arms.T[1:])
            rows.append((group, f"{low} to {high}", len(part), points(arms[:, 0]), *above))
    heads = ("trained hosts", "epochs left", "hosts", "widened in place", *names, "a new network")
    return table(heads, rows)


def look_table(groups: dict[str, tuple[list[Outcomes], list[Outcomes]]]) -> str:
    """Utilities of forests above one that sees nothing of a training, by what they see."""
    columns = {
        name: {
            look: worth(hosts, choices(partial(forest, function), hosts, lessons))
            for look, function in LOOKS.items()
        }
        for name, (hosts, lessons) in groups.items()
    }
    rows = []
    for look in LOOKS:
        cells = [
            points(column[look])
            if look == "nothing"
            else points(column[look] - column["nothing"], "+.1f")
            for column in columns.values()
        ]
        rows.append((look, *cells))
    return table(("a forest that sees", *groups), rows)


def trial_table(groups: dict[str, tuple[list[Outcomes], list[Outcomes]]]) -> str:
    """What a trial adds to the choice of the table, and its operations."""
    rows = []
    for share, weight in product(TRIALS, WEIGHTS):
        cells = []
        for hosts, lessons in groups.values():
            gains, ratios = trial(hosts, lessons, share, weight)
            cells += [points(gains, "+.1f"), f"{fmean(ratios):.2f}"]
        ships = " (ships)" if (share, weight) == (TRIAL, 0.5) else ""
        rows.append((f"{share:.0%}{ships}", weight, *cells))
    heads = [text for name in groups for text in (name, "operations")]
    return table(("epochs", "counts", *heads), rows)


def main() -> None:
    """Play what was not played, and write the page."""
    arguments = new_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    home = played("home", capacity_home.draw, HOSTS)
    held_out = played("held-out", held_out_hosts.draw, HELD_OUT)
    tables, gates = [], []
    ranks = []
    seen: dict[str, tuple[list[Outcomes], list[Outcomes]]] = {}
    tried: dict[str, tuple[list[Outcomes], list[Outcomes]]] = {}
    for trained in (False, True):
        lessons = [host for host in home if host["trained"] == trained]
        foreign = [host for host in held_out if host["trained"] == trained]
        rest = [host for host in home if host["trained"] != trained]
        kind = "trained" if trained else "from scratch"
        for name, hosts in (("home", lessons), ("held out", foreign)):
            seen[f"{kind}, {name}"], tried[f"{kind}, {name}"] = (hosts, lessons), (hosts, home)
            ranks.append((f"{kind}, {name}", *(f"{x:.2f}" for x in correlations(hosts, home))))
        here, there = (all_columns(part, lessons, rest) for part in (lessons, foreign))
        tables.append(
            rung_table({f"home, {len(lessons)}": here, f"held out, {len(foreign)}": there})
        )
        for other in ("best constant", RULE):
            above = points(there["clairvoyant, all plans"] - there[other], "+.1f")
            gates.append((kind, other, above))
    groups = {"home": home, "held out": held_out}
    trained_groups = {name: [h for h in part if h["trained"]] for name, part in groups.items()}
    gains = [
        (f"to {width}", *(f"{100 * gain:.1f}" for gain in row))
        for width, row in gains_by_width(home).items()
    ]
    parts = [
        "## From scratch", tables[0], "## Arrived trained", tables[1],
        "## Every arm with its own rate", tuned_table(trained_groups, home),
        "## What of a trained network to keep", share_table(trained_groups),
        "## What looking adds", look_table(seen), "## What a trial adds", trial_table(tried),
        "## Predicted and true gain", table(RANK_HEADS, ranks),
        "## The gate", table(("hosts", "clairvoyant above", "points"), gates),
        "## The table of gains", table(("width", *FACTORS[1:]), gains), made_on(),
    ]  # fmt: skip
    publish("capacity", "How large a network should become", parts, arguments.write)


if __name__ == "__main__":
    main()
