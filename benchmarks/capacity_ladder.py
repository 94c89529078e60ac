"""The suite ``capacity``: its controls, which ship with Esper, and policies of ``esper.grow``.

    python benchmarks/capacity_ladder.py [--write]      # half an hour on a core; resumable

The hosts are those of ``esper evaluate --suite capacity``, with numbers that no study had before.
Rules are learned on the hosts of ``capacity_home.py`` as ``capacity_page.py`` played them. Results
are kept in ``runs/capacity_ladder``.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import capacity_home
import numpy as np
import torch
from capacity_page import HOSTS as LESSONS
from capacity_page import best_result, played
from capacity_plays import WIDENINGS, operations_of, outcomes, short_statics, utility
from capacity_rules import Choice, Outcomes, arrival, by_table, constant, forest
from reporting import kept, made_on, new_parser, publish, table
from scipy.stats import spearmanr
from watched_growth import watched_growth

from esper.kasmina.width_prior import GAINS
from esper_lab.capacity import ladder
from esper_lab.capacity.hosts import Host
from esper_lab.capacity.training import PRETRAINING, grown
from esper_lab.capacity.training import arrival as arrival_of
from esper_lab.evaluation import (
    BEST_FIXED,
    CAPACITY,
    CLAIRVOYANT,
    FOREST,
    LOOKUP,
    NEVER_GROW,
    SHORT_SWEEP,
    STATIC_LOOKUP,
    SWEEP,
    Evaluation,
    Rung,
)
from esper_lab.ladder_steps import points, points_text, step_cells, steps
from esper_lab.shipped_controls import ShippedControls, write_shipped

WORK = Path("runs/capacity_ladder")
HOSTS, SETS = 200, 3
POLICIES = "widen", "deepen", "rule", "heuristic", "keep-or-move"
Rows = list[tuple[str, ...]]
HEADS = "", "utility, points", "above never", "on validation", "parameters", "widen − this"


def all_controls(host: Host) -> Outcomes:
    """What the controls need of a host."""
    entry = outcomes(host, WIDENINGS) | {"short": short_statics(host, host.data())}
    return entry | {"never": grown("never", host)}


def control_rungs(hosts: list[Outcomes], lessons: list[Outcomes]) -> list[Rung]:
    """The controls, from the bottom up.

    Args:
        hosts: ``all_controls`` of the fresh hosts.
        lessons: what was played on those on which the constant and the forest are learned, for
            hosts from scratch and for trained ones apart; the table is that of ``esper.grow``.
    """
    rungs = [rung_of(NEVER_GROW, hosts, [[host["never"]] for host in hosts])]
    learners: dict[str, Callable[[list[Outcomes]], Choice]] = {
        BEST_FIXED: constant, LOOKUP: lambda _: by_table(GAINS), FOREST: partial(forest, arrival)
    }  # fmt: skip
    for name, learn in learners.items():
        plans = [0] * len(hosts)
        for kind in (False, True):
            choose = learn([lesson for lesson in lessons if lesson["trained"] == kind])
            for i, host in enumerate(hosts):
                if host["trained"] == kind:
                    plans[i] = choose(host)
        rungs.append(rung_of(name, hosts, _of_plans(hosts, plans), plans))
        if name == LOOKUP:
            statics = [[host["statics"][i]] for host, i in zip(hosts, plans, strict=True)]
    rungs.append(rung_of(STATIC_LOOKUP, hosts, statics))
    for name, column in ((SHORT_SWEEP, "short"), (SWEEP, "statics")):
        rungs.append(rung_of(name, hosts, [[best_result(host, host[column])] for host in hosts]))
    worth = np.array([[[utility(x, h) for x in order] for order in h["plans"]] for h in hosts])
    first, second = worth.argmax(2).T
    # The plan that is best in one order of the data is scored in the other.
    both = zip(hosts, first, second, strict=True)
    results = [[host["plans"][1][one], host["plans"][0][two]] for host, one, two in both]
    return [*rungs, rung_of(CLAIRVOYANT, hosts, results, first.tolist())]


def rung_of(
    name: str,
    hosts: list[Outcomes],
    results: list[list[dict[str, Any]]],
    plans: list[int] | None = None,
) -> Rung:
    """A rung from one or several results of each host, of which the mean counts.

    Args:
        name: see ``Rung``.
        hosts: what is known of each host.
        results: what trainings of each host came to, see ``capacity_plays.train``.
        plans: index in ``ladder.PLANS`` for each host, if the rung chooses.
    """

    def column(value: Callable[[dict[str, Any], Outcomes], float]) -> list[float]:
        pairs = zip(hosts, results, strict=True)
        return [float(np.mean([value(one, host) for one in each])) for host, each in pairs]

    return Rung(
        name,
        False,
        utility=column(utility),
        validation=column(partial(utility, split="validation")),
        added=column(lambda one, host: one["parameters"] - host["parameters"]),
        chosen=plans,
        score=column(lambda one, _: one["test"]),
    )


def _of_plans(hosts: list[Outcomes], plans: list[int]) -> list[list[dict[str, Any]]]:
    return [[order[i] for order in host["plans"]] for host, i in zip(hosts, plans, strict=True)]


def tried(host: Host) -> dict[str, Any]:
    """What ``POLICIES[0]`` did, foretold and cost, without that in which a host learned before."""
    data, small = arrival_of(host)
    entry = watched_growth(POLICIES[0], host)
    if host.trained:
        entry["operations"] -= PRETRAINING * host.samples * operations_of(small, data.x)
    return entry


_TRIAL = re.compile(r"([+-][\d.]+).* with and without them .*, and ([+-][\d.]+) expected")


def prediction_rows(hosts: list[Outcomes], growths: list[Outcomes], plans: list[int]) -> Rows:
    """How well gains are foretold where layers are tried: rank correlations with those at the end.

    Args:
        hosts: ``all_controls`` of all hosts.
        growths: ``tried`` of them.
        plans: index of the factor that the table chooses for each host.
    """
    names = "trial", "study", "first_order", "ablation"
    predictions: dict[str, list[float]] = {name: [] for name in names}
    gain, paid = [], []
    for host, growth, plan in zip(hosts, growths, plans, strict=True):
        match = next(filter(None, map(_TRIAL.search, growth["actions"])), None)
        if match is None or plan == 0:
            continue
        scale = 1.0 if host["outputs"] > 1 else 100.0
        predictions["trial"].append(scale * float(match[1]))
        predictions["study"].append(scale * float(match[2]))
        predictions["first_order"].append(growth["first_order"])
        predictions["ablation"].append(growth["ablation"])
        orders = [(order[plan], order[0]) for order in host["plans"]]
        gain.append(fmean(100.0 * (wide["test"] - narrow["test"]) for wide, narrow in orders))
        worth = [[utility(one, host) for one in pair] for pair in orders]
        paid.append(fmean(wide - narrow for wide, narrow in worth) > 0.0)
    draws = np.random.default_rng(0).integers(len(gain), size=(2000, len(gain)))
    predictions["both"] = np.add(predictions["trial"], predictions["study"]).tolist()
    lines = []
    for name, values in predictions.items():
        ranks = [spearmanr(np.array(values)[d], np.array(gain)[d]).statistic for d in draws]
        ends = np.quantile(ranks, (0.025, 0.975))
        mean = float(spearmanr(values, gain).statistic)
        text = points_text([mean, *map(float, ends)], ".2f")
        lines.append((name.replace("_", " "), text))
    return [*lines, (f"{len(gain)} hosts, of which {sum(paid)} profit", "")]


def compute_rows(
    hosts: list[Outcomes], rungs: dict[str, Rung], ours: tuple[Rung, list[float]], where: np.ndarray
) -> tuple[Rows, str]:
    """Operations, score and utility of rungs on some hosts, and a line on equal operations.

    Args:
        hosts: ``all_controls`` of all hosts.
        rungs: the controls by name.
        ours: the policy's rung, and its operations on each host.
        where: the hosts.
    """

    def total(column: str) -> list[float]:
        return [sum(one["operations"] for one in host[column]) for host in hosts]

    def of_choice(name: str) -> list[float]:
        chosen = zip(hosts, rungs[name].chosen or [], strict=True)
        return [float(np.mean([order[i]["operations"] for order in h["plans"]])) for h, i in chosen]

    lookup = rungs[LOOKUP].chosen or []
    never = np.array([host["statics"][0]["operations"] for host in hosts])
    operations = {
        NEVER_GROW: never.tolist(),
        BEST_FIXED: of_choice(BEST_FIXED),
        LOOKUP: of_choice(LOOKUP),
        STATIC_LOOKUP: [h["statics"][i]["operations"] for h, i in zip(hosts, lookup, strict=True)],
        SHORT_SWEEP: total("short"),
        SWEEP: total("statics"),
    }
    policy, spent = ours
    lines: Rows = []
    for rung, each in [*((rungs[n], x) for n, x in operations.items()), (policy, spent)]:
        score = points(np.array(rung.score)[where], [None] * int(where.sum()))
        ratio = float(np.mean((np.array(each) / never)[where]))
        worth = 100.0 * float(np.mean(np.array(rung.utility)[where]))
        lines.append((rung.name, f"{ratio:.2f}", points_text(score, ".1f"), f"{worth:.1f}"))
    # Of the static networks, whose operations grow with their size, the one with as many.
    same = [
        np.interp(
            np.log(x),
            [np.log(one["operations"]) for one in host["statics"]],
            [utility(one, host) for one in host["statics"]],
        )
        for host, x in zip(hosts, spent, strict=True)
    ]
    change = points(np.subtract(policy.utility, same)[where], [None] * int(where.sum()))
    worth = 100.0 * float(np.mean(np.array(same)[where]))
    return lines, (
        f"A static network whose training takes as many operations as that with `widen` has a "
        f"utility of {worth:.1f} points; `widen` minus it: {points_text(change)}."
    )


def rows(evaluations: dict[str, Evaluation], where: np.ndarray) -> list[tuple[str, ...]]:
    """The rungs of all policies on some hosts, and how far the first policy is above each."""
    first = evaluations[POLICIES[0]]
    ours = first.rungs[-1]
    last = [steps(evaluations[name], where)[-1] for name in POLICIES[1:]]
    lines = []
    for step in (*steps(first, where), *last):
        change = np.subtract(ours.utility, step.rung.utility)[where]
        text = "" if step.rung is ours else points_text(points(change, [None] * len(change)))
        lines.append((step.rung.name, *step_cells(step), text))
    return lines


def differences(evaluation: Evaluation, opponents: Sequence[str], hosts: np.ndarray) -> list[str]:
    """How far the policy is above some rungs on some hosts."""
    rungs = {rung.name: np.array(rung.utility) for rung in evaluation.rungs}
    ours = np.array(evaluation.rungs[-1].utility)
    changes = ((ours - rungs[name])[hosts] for name in opponents)
    return [points_text(points(change, [None] * len(hosts))) for change in changes]


def main() -> None:
    """Play what was not played, and write the page and the controls that ship."""
    arguments = new_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    lessons = played("home", capacity_home.draw, LESSONS)
    hosts = ladder.fresh_hosts(HOSTS)
    fresh = [
        kept(WORK / f"{number}.json", partial(all_controls, host))
        for number, host in enumerate(hosts)
    ]
    rungs = control_rungs(fresh, lessons)
    key = ladder.identity(hosts)
    controls = ShippedControls(key, made_on(), len(lessons), HOSTS, rungs)
    if arguments.write:
        write_shipped(CAPACITY, controls)
    evaluations = {name: ladder.evaluate(name, HOSTS, controls, WORK) for name in POLICIES}
    parts = [
        f"{HOSTS} hosts of data sets and architectures on which no rule was learned; brackets are "
        "95 % over hosts. `widen` is what `esper.grow` does by default."
    ]
    first = evaluations[POLICIES[0]]
    tasks = first.tasks
    groups = {"All": np.ones(HOSTS, dtype=bool)}
    groups |= {kind.capitalize(): np.array(tasks) == kind for kind in dict.fromkeys(tasks)}
    for kind, where in groups.items():
        parts += [f"## {kind}, {where.sum()} hosts", table(HEADS, rows(evaluations, where))]
    opponents = NEVER_GROW, BEST_FIXED, LOOKUP, SHORT_SWEEP, SWEEP
    sets = [
        (f"{part[0] + 1} to {part[-1] + 1}", *differences(first, opponents, part))
        for part in np.array_split(np.arange(HOSTS), SETS)
    ]
    growths = [
        kept(WORK / f"growth-{number}.json", partial(tried, host))
        for number, host in enumerate(hosts)
    ]
    spent = [growth["operations"] for growth in growths]
    heads = "", "training operations, times never grown", "test score, points", "utility, points"
    for kind, where in groups.items():
        by_name = {rung.name: rung for rung in rungs}
        lines, line = compute_rows(fresh, by_name, (first.rungs[-1], spent), where)
        parts += [f"## Compute, {kind.lower()}", table(heads, lines), line]
    lookup = next(rung for rung in rungs if rung.name == LOOKUP)
    ranks = prediction_rows(fresh, growths, lookup.chosen or [])
    parts += [
        "## Predictions",
        "Rank correlation with the gain of test score at the end, without the price, of the factor "
        "of the table in both orders of the data; the study's prediction is after the price.",
        table(("prediction", "rank correlation"), ranks),
    ]
    parts += ["## In three sets", table(("hosts", *(f"widen − {x}" for x in opponents)), sets)]
    ours = first.rungs[-1].utility
    figures = {rung.name: points(np.subtract(ours, rung.utility), [None] * HOSTS) for rung in rungs}
    page = "capacity_ladder", "The suite capacity", [*parts, f"{made_on()}."]
    publish(*page, arguments.write, {"hosts": HOSTS, "widen_minus": figures})


if __name__ == "__main__":
    main()
