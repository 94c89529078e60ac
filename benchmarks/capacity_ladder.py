"""The suite ``capacity``: its controls, which ship with Esper, and policies of ``esper.grow``.

    python benchmarks/capacity_ladder.py [--write]      # three hours on a core; resumable

The hosts are those of ``esper evaluate --suite capacity``, with numbers that no study had before.
Rules are learned on the hosts of ``capacity_home.py``. Results are kept in
``runs/capacity_ladder``.
"""

import math
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
from capacity_page import best_result, large_enough
from capacity_plays import WIDENINGS, outcomes, short_statics, utility
from capacity_rates import further_growth, further_lessons, further_statics, gain_parts, tuned
from capacity_rules import Choice, Outcomes, arrival, by_table, constant, forest
from msgspec.structs import replace
from reporting import kept, made_on, new_parser, publish, table
from scipy.stats import spearmanr
from watched_growth import watched_growth

from esper.kasmina.width_prior import GAINS
from esper_lab.capacity import ladder
from esper_lab.capacity.hosts import Host
from esper_lab.capacity.training import grown
from esper_lab.evaluation import (
    BEST_FIXED,
    CAPACITY,
    CLAIRVOYANT,
    FOREST,
    LOOKUP,
    NEVER_GROW,
    SHORT_SWEEP,
    STATIC_LOOKUP,
    STATIC_SIZES,
    SWEEP,
    Evaluation,
    Rung,
)
from esper_lab.ladder_steps import (
    Points,
    points,
    points_text,
    step_cells,
    step_heads,
    steps,
    training_text,
)
from esper_lab.shipped_controls import ShippedControls, write_shipped

WORK, RATES_WORK = Path("runs/capacity_ladder"), Path("runs/capacity_rates")
HOSTS, SETS = 200, 3
COSTS = """\
*Score* is that on test, in points. *Utility* is the score minus the price of parameters and that of
training, which are drawn for each host: a network twice as large costs 0.2 to 7 points, a training
of twice the operations 0.02 to 0.7. *Doublings* is how often the training of never growing is
doubled. Trials count, and so do the 256 candidates among which new units are chosen; a backward
pass counts twice, a sweep all of its trainings. `widen` and the rules know both prices, other
policies that of parameters."""
TIMES = """\
The same networks with processor time for operations: the price is that of twice the time, which
none of the choices knew. Static networks and plans are trained in a plain loop, `widen` by
`esper.grow`, which validates after every epoch; each is compared with never growing in its own
loop, on one core."""
TUNED = """\
Above, every network is trained at a rate of 0.005. Here each has the rate, of 0.002, 0.005, 0.015
and 0.04, that is best on validation; of `widen` it is best after the price of parameters. One
training counts of each: all four would double the cost of every row twice. The sweep chooses among
20 trainings, of which five count."""
PREDICTIONS = """\
*First order* is the squared norm of the gradient of the new channels' outgoing weights at birth,
as a part of the loss; *ablation* is what validation loses at the end of the trial without the
new channels. By how much a step would lower the loss says next to nothing about what wider
layers gain, so `esper.grow` chooses by it which units are new, and not how many or where."""
OURS = "widen"
POLICIES = OURS, "deepen", "rule", "heuristic", "keep-or-move"
Rows = list[tuple[str, ...]]


def all_controls(host: Host) -> Outcomes:
    """What the controls need of a host."""
    entry = outcomes(host, WIDENINGS) | {"short": short_statics(host, host.data())}
    return entry | {"never": grown("never", host)}


def choices(hosts: list[Outcomes], lessons: list[Outcomes]) -> dict[str, list[int]]:
    """The plan of each host by rules.

    Args:
        hosts: ``all_controls`` of the fresh hosts.
        lessons: what was played on those on which the constant and the forest are learned, for
            hosts from scratch and for trained ones apart; the table is that of ``esper.grow``.
    """
    learners: dict[str, Callable[[list[Outcomes]], Choice]] = {
        BEST_FIXED: constant, LOOKUP: lambda _: by_table(GAINS), FOREST: partial(forest, arrival)
    }  # fmt: skip
    rules = {
        name: [learn([one for one in lessons if one["trained"] == kind]) for kind in (False, True)]
        for name, learn in learners.items()
    }
    return {name: [rule[host["trained"]](host) for host in hosts] for name, rule in rules.items()}


def control_rungs(hosts: list[Outcomes], plans: dict[str, list[int]]) -> list[Rung]:
    """The controls, from the bottom up.

    Args:
        hosts: ``all_controls`` of the fresh hosts.
        plans: see ``choices``.
    """
    rungs = [rung_of(NEVER_GROW, hosts, [[host["never"]] for host in hosts])]
    rungs += [rung_of(name, hosts, _of_plans(hosts, each), each) for name, each in plans.items()]
    statics = [[host["statics"][i]] for host, i in zip(hosts, plans[LOOKUP], strict=True)]
    rungs.append(rung_of(STATIC_LOOKUP, hosts, statics))
    for i, name in enumerate(STATIC_SIZES, 1):
        rungs.append(rung_of(name, hosts, [[host["statics"][i]] for host in hosts]))
    for name, column in ((SHORT_SWEEP, "short"), (SWEEP, "statics")):
        results = []
        for host in hosts:
            total = sum(one["operations"] for one in host[column])
            results.append([best_result(host, host[column]) | {"operations": total}])
        rungs.append(rung_of(name, hosts, results))
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
        operations=column(lambda one, _: one["operations"]),
    )


def _of_plans(hosts: list[Outcomes], plans: list[int]) -> list[list[dict[str, Any]]]:
    return [[order[i] for order in host["plans"]] for host, i in zip(hosts, plans, strict=True)]


_TRIAL = re.compile(r"([+-][\d.]+).* with and without them .*, and ([+-][\d.]+) expected")


def prediction_rows(hosts: list[Outcomes], growths: list[Outcomes], plans: list[int]) -> Rows:
    """How well gains are foretold where layers are tried: rank correlations with those at the end.

    Args:
        hosts: ``all_controls`` of all hosts.
        growths: ``watched_growth`` of them.
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


def in_time(host: Outcomes) -> Outcomes:
    """The outcomes of a host with processor time, as a multiple of never growing, for operations.

    What was trained by a plain loop is compared with never growing by the same loop.
    """
    never = fmean(order[0]["seconds"] for order in host["plans"])

    def timed(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one | {"operations": one["seconds"] / never} for one in results]

    columns = {name: timed(host[name]) for name in ("statics", "short")}
    one = {"operations": 1.0}
    plans = [timed(order) for order in host["plans"]]
    return host | columns | one | {"plans": plans, "never": host["never"] | one}


def equal_cost_text(ours: Rung, hosts: list[Outcomes], what: str, where: np.ndarray) -> str:
    """How far a policy is above the static network of the same cost, interpolated over sizes."""
    same = []
    for host, cost in zip(hosts, ours.operations or [], strict=True):
        sizes = sorted((math.log(one["operations"]), utility(one, host)) for one in host["statics"])
        costs, worth = map(list, zip(*sizes, strict=True))
        same.append(float(np.interp(math.log(cost), costs, worth)))
    change = points(np.subtract(ours.utility, same)[where], [None] * int(where.sum()))
    return (
        f"A static network whose training takes as much in {what} as that with `widen` has a "
        f"utility of {100.0 * float(np.mean(np.array(same)[where])):.1f} points; `widen` minus it: "
        f"{points_text(change)}."
    )


def difference(ours: Rung, rung: Rung, where: np.ndarray) -> Points:
    """How far a policy is above a rung on some hosts."""
    change = np.subtract(ours.utility, rung.utility)[where]
    return points(change, [None] * len(change))


def minus(ours: Rung, rung: Rung, where: np.ndarray) -> str:
    """The difference as text; empty for the policy itself."""
    return "" if rung is ours else points_text(difference(ours, rung, where))


def ladder_parts(
    evaluation: Evaluation,
    hosts: list[Outcomes],
    groups: dict[str, np.ndarray],
    what: str = "operations",
    further: Sequence[Evaluation] = (),
) -> list[str]:
    """A table of each group of hosts, and how far the policy is above static networks of its cost.

    Args:
        evaluation: of the policy.
        hosts: what is known of its hosts.
        groups: which hosts belong to each.
        what: what training costs.
        further: of other policies, on the same hosts.
    """
    ours, parts = evaluation.rungs[-1], list[str]()
    for name, where in groups.items():
        more = [steps(each, where)[-1] for each in further]
        ladder_steps = [*steps(evaluation, where), *more]
        rows = [
            (x.rung.name, *step_cells(x), f"{x.costs[0]:.1f}", minus(ours, x.rung, where))
            for x in ladder_steps
        ]
        heads = "", *step_heads(ladder_steps[0]), "score", "widen − this"
        parts += [f"### {name}, {where.sum()} hosts", table(heads, rows)]
        parts.append(equal_cost_text(ours, hosts, what, where))
    return [*parts, training_text(evaluation, f"{what} of training")]


def differences(evaluation: Evaluation, opponents: Sequence[str], hosts: np.ndarray) -> list[str]:
    """How far the policy is above some rungs on some hosts."""
    rungs = {rung.name: rung for rung in evaluation.rungs}
    return [minus(evaluation.rungs[-1], rungs[name], hosts) for name in opponents]


def at_best_rates(
    evaluation: Evaluation, hosts: list[Host], fresh: list[Outcomes], plans: dict[str, list[int]]
) -> tuple[Evaluation, list[Outcomes]]:
    """A policy between static networks where each has its own rate, and what is known of hosts."""

    def at_rates(name: str, play: Callable[[Host], Any]) -> list[Any]:
        paths = (RATES_WORK / f"{name}-{number}.json" for number in range(len(hosts)))
        return [kept(path, partial(play, host)) for path, host in zip(paths, hosts, strict=True)]

    nevers, growths = (at_rates(name, partial(further_growth, name)) for name in ("never", OURS))
    columns = zip(fresh, at_rates("statics", further_statics), nevers, strict=True)
    outcomes_of_hosts = [tuned(*each) for each in columns]
    names = NEVER_GROW, STATIC_LOOKUP, *STATIC_SIZES, SWEEP
    rungs = [rung for rung in control_rungs(outcomes_of_hosts, plans) if rung.name in names]
    entries = zip(fresh, growths, ladder.entries(OURS, hosts, WORK), strict=True)
    best = [best_result(one, [*more, entry]) for one, more, entry in entries]
    operations = rungs[0].operations or []
    ours = ladder.rung_of(evaluation.rungs[-1].name, best, hosts, operations)
    return replace(evaluation, rungs=[*rungs, ours]), outcomes_of_hosts


def main() -> None:
    """Play what was not played, and write the page and the controls that ship."""
    arguments = new_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    hosts = ladder.fresh_hosts(HOSTS)
    fresh = [
        kept(WORK / f"{number}.json", partial(all_controls, host))
        for number, host in enumerate(hosts)
    ]
    homes = {number: capacity_home.draw(number) for number in range(LESSONS)}
    homes = {number: host for number, host in homes.items() if large_enough(host)}
    lessons = [
        kept(WORK / f"lesson-{number}.json", partial(outcomes, host, WIDENINGS, ()))
        for number, host in homes.items()
    ]
    plans = choices(fresh, lessons)
    rungs = control_rungs(fresh, plans)
    controls = ShippedControls(ladder.identity(hosts), made_on(), len(lessons), HOSTS, rungs)
    if arguments.write:
        write_shipped(CAPACITY, controls)
    evaluations = {name: ladder.evaluate(name, HOSTS, controls, WORK) for name in POLICIES}
    parts = [
        f"{HOSTS} hosts of data sets and architectures on which no rule was learned; brackets are "
        "95 % over hosts. `widen` is what `esper.grow` does by default."
    ]
    first, *further = evaluations.values()
    tasks = first.tasks
    groups = {"All": np.ones(HOSTS, dtype=bool)}
    groups |= {kind.capitalize(): np.array(tasks) == kind for kind in dict.fromkeys(tasks)}
    parts += [COSTS, *ladder_parts(first, fresh, groups, further=further)]
    nevers, growths = (ladder.entries(name, hosts, WORK) for name in ("never", OURS))
    timed = [
        growth | {"operations": growth["seconds"] / never["seconds"]}
        for growth, never in zip(growths, nevers, strict=True)
    ]
    ours = first.rungs[-1]
    in_seconds = ladder.rung_of(ours.name, timed, hosts, [1.0] * HOSTS)
    fresh_in_time = [*map(in_time, fresh)]
    by_time = replace(first, rungs=[*control_rungs(fresh_in_time, plans), in_seconds])
    parts += ["## By processor time", TIMES]
    parts += ladder_parts(by_time, fresh_in_time, groups, "processor time")
    by_rate, fresh_by_rate = at_best_rates(first, hosts, fresh, plans)
    parts += ["## Each at its best rate", TUNED, *ladder_parts(by_rate, fresh_by_rate, groups)]
    further_rates = [
        kept(RATES_WORK / f"lesson-{number}.json", partial(further_lessons, host))
        for number, host in homes.items()
    ]
    parts += gain_parts(lessons, further_rates)
    opponents = NEVER_GROW, BEST_FIXED, LOOKUP, SHORT_SWEEP, SWEEP
    sets = [
        (f"{part[0] + 1} to {part[-1] + 1}", *differences(first, opponents, part))
        for part in np.array_split(np.arange(HOSTS), SETS)
    ]
    watched = [
        kept(WORK / f"growth-{number}.json", partial(watched_growth, OURS, host))
        for number, host in enumerate(hosts)
    ]
    parts += [
        "## Predictions",
        "Rank correlation with the gain of test score at the end, without the price, of the factor "
        "of the table in both orders of the data; the study's prediction is after the price.",
        table(("prediction", "rank correlation"), prediction_rows(fresh, watched, plans[LOOKUP])),
        PREDICTIONS,
    ]
    parts += ["## In three sets", table(("hosts", *(f"widen − {x}" for x in opponents)), sets)]
    figures = {
        key: {x.name: difference(each.rungs[-1], x, groups["All"]) for x in each.rungs[:-1]}
        for key, each in (("widen_minus", first), ("tuned_minus", by_rate))
    }
    page = "capacity_ladder", "The suite capacity", [*parts, f"{made_on()}."]
    publish(*page, arguments.write, {"hosts": HOSTS, **figures})


if __name__ == "__main__":
    main()
