"""What growing costs: figures beside operations and processor time, among static sizes.

Part of ``widening.py``. Static networks of several widths, each at a tuned rate, make an envelope:
the best figure for a cost, interpolated over its logarithm.
"""

import math
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from reporting import kept, made_on, table
from widening_hosts import EPOCHS, GROWN, HOSTS, Host, best_rate, from_scratch

from esper.karn.intervals import interval
from esper_lab.ladder_steps import points_text

TUNING, SEEDS = range(100, 104), range(8)
COSTS = {"operations": "operations", "seconds": "processor time"}
Result = dict[str, float]


def arms_of(host: Host, factor: float) -> dict[str, list[Result]]:
    """Results of growing, and of static networks by how many times as wide they are.

    All arms of a seed are trained in turn, as the speed of a machine drifts.
    """
    widths = sorted({1, 2, 4, factor})
    arms = {f"{times:g}": partial(from_scratch, host, times, "never", EPOCHS) for times in widths}
    arms["grown"] = partial(from_scratch, host, 1, "widen", EPOCHS)
    rates = {name: best_rate(arm, TUNING) for name, arm in arms.items()}
    results: dict[str, list[Result]] = {name: [] for name in arms}
    for seed in SEEDS:
        for name, arm in arms.items():
            results[name].append(arm(seed, rates[name]) | {"rate": rates[name]})
    return results


def envelope(sizes: list[list[Result]], cost: str, at: float) -> list[float]:
    """The figures, by seed, of static networks that cost as much as ``at``.

    Sizes that have less on the mean than a cheaper one are left out.
    """
    front: list[list[Result]] = []
    for size in sorted(sizes, key=lambda results: fmean(one[cost] for one in results)):
        if not front or fmean(each["test"] for each in size) > fmean(o["test"] for o in front[-1]):
            front.append(size)
    costs = [math.log(fmean(one[cost] for one in size)) for size in front]
    seeds = zip(*front, strict=True)
    return [float(np.interp(math.log(at), costs, [one["test"] for one in each])) for each in seeds]


def interval_text(values: list[float], form: str = ".1f") -> str:
    """Mean and 95 % interval over seeds (Student's t)."""
    estimate = interval(np.array([values]))
    return points_text((estimate.mean[0], estimate.low[0], estimate.high[0]), form)


def cost_page(work: Path) -> list[str]:
    """The tables of what growing costs."""
    summary, every = [], []
    for name, host in HOSTS.items():
        make = partial(arms_of, host, GROWN.get(name, 8))
        arms = kept(work / f"cost-{name}.json", make)
        grown = arms["grown"]
        sizes = [results for arm, results in arms.items() if arm != "grown"]
        base = {cost: fmean(one[cost] for one in arms["1"]) for cost in COSTS}
        cells = []
        for cost in COSTS:
            mean = fmean(one[cost] for one in grown)
            rest = envelope(sizes, cost, mean)
            change = [one["test"] - other for one, other in zip(grown, rest, strict=True)]
            cells += [f"{mean / base[cost]:.1f}", interval_text(change, "+.1f")]
        summary.append((name, *cells))
        for arm, results in arms.items():
            multiples = [fmean(one[cost] for one in results) / base[cost] for cost in COSTS]
            label = "grown" if arm == "grown" else f"static, {arm} times as wide"
            rate = results[0]["rate"]
            size = fmean(one["parameters"] for one in results)
            figure = interval_text([one["test"] for one in results])
            every.append(
                (name, label, f"{size:,.0f}", rate, figure, *(f"{m:.1f}" for m in multiples))
            )
    heads = (
        "host", "operations", "grown − static, as many operations", "processor time",
        "grown − static, as much time",
    )  # fmt: skip
    columns = ("host", "network", "parameters", "rate", "figure", *COSTS.values())
    return [
        f"## What growing costs\n\n{EPOCHS} epochs, {len(SEEDS)} seeds, all networks of a seed in "
        "turn, each at its best of three rates on four other seeds. Costs are multiples of never "
        "growing: operations of the layers in training, trials included, and processor time, with "
        "validation after every epoch. The grown network is compared with static ones that cost "
        "as much, interpolated over sizes, and with the largest where it costs more than all; "
        "sizes that a cheaper one beats on test are left out. Brackets: 95 % over seeds (Student's "
        "t).",
        table(heads, summary),
        table(columns, every),
        f"{made_on()}.",
    ]
