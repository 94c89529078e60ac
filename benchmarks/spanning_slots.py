"""What do slots bring in which a layer becomes wider, beside the residual ones of ``esper train``?

    python benchmarks/spanning_slots.py --write     # 40 minutes on two cores; resumable

Fixed schedules: for each host the best of 55 plans (no seed; a seed in the first slot, the last or
in all at once, of three sizes, three styles and two starts) and of four pairs of learning rates of
host and seeds, chosen by utility on 32 hosts and scored on 64 others, with eight splits of the data
each. Static networks are those hosts with wider layers from the start, of the width and rate with
the best utility on the same 32. Utility is expected test accuracy less the price of the parameters
above those of the small host.

PPO: ``esper train ppo`` on each of these hosts; trainings differ in ``--slots`` alone. Differences
are paired by host and by seed; brackets hold 95 % intervals, over splits and over seeds.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from reporting import kept, made_on, new_parser, publish, table

from esper.karn.intervals import interval
from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import resolve_slots
from esper.kasmina.hosts.mlp import MlpHost
from esper.leyline.actions import Style
from esper.leyline.config import unflatten
from esper.runtime.tasks import TASKS, Task
from esper.simic.training.vectorized import run_training
from esper_lab.ladder_steps import points_text
from esper_lab.plans import NEVER, Plan, PlannedSeed
from esper_lab.play import Population, play_plans

SLOTS = {"residual": (), "wide": ("wide",), "both": ("r0c0", "r0c1", "wide")}
HOSTS = {
    "convolutions 4-8": TASKS["digits_shift"](),
    "perceptron 4-4": replace(
        TASKS["digits_mlp"](),
        name="digits_mlp_4",
        host=MlpHost(widths=(4, 4), classes=10, image=(8, 8, 1)),
    ),
}
STYLES = Style.LINEAR_ADD, Style.LINEAR_MULTIPLY, Style.GATED_GATE
PLANS = (
    NEVER,
    *(
        Plan(
            f"{where} slot, size {size:g}, {style.name}, from {start:g}",
            tuple(PlannedSeed(position, size, start, int(style)) for position in positions),
            at_once=True,
        )
        for where, positions in {"first": (0.0,), "last": (1.0,), "every": (0.0, 0.5, 1.0)}.items()
        for size in (0.0, 0.5, 1.0)
        for style in STYLES
        for start in (0.0, 0.25)
    ),
)
HOST_RATES, SEED_RATES, FACTORS = (0.5, 1.0, 2.0), (0.4, 1.0), (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
SPLITS, CHOICE_HOSTS, FRESH_HOSTS = 8, 4, 8
SEEDS, LAST = range(1, 9), 5


def hosts_of(task: Task, fresh: bool) -> Population:
    """Hosts of a task, with eight splits of the data."""
    each = FRESH_HOSTS if fresh else CHOICE_HOSTS
    tasks = [task.with_split(split + SPLITS * fresh) for split in range(SPLITS)]
    tasks = [one for one in tasks for _ in range(each)]
    return Population(tuple(tasks), first=10_000 * fresh, seed=5, threads=2)


def scores(task: Task, plans: tuple[Any, ...], fresh: bool) -> dict[str, list[list[float]]]:
    """Utility and accuracy on the test split and added parameters, by host and plan."""
    outcome = play_plans(hosts_of(task, fresh), plans)
    return {
        "utility": outcome.test_utility.tolist(),
        "accuracy": outcome.test_accuracy.tolist(),
        "added": outcome.added.tolist(),
    }


def rated(task: Task, host: float, seed: float) -> Task:
    """The task with multiples of its learning rate for hosts and for seeds."""
    rate = task.learning_rate
    return replace(task, host_learning_rate=host * rate, learning_rate=seed * host * rate)


def wider(task: Task, factor: float) -> Task:
    """The task with a static network whose layers are wider by a factor."""
    host = task.host
    if isinstance(host, CnnHost):
        channels = tuple(round(width * factor) for width in host.channels)
        return replace(task, host=replace(host, channels=channels))
    assert isinstance(host, MlpHost)
    return replace(task, host=replace(host, widths=tuple(round(w * factor) for w in host.widths)))


def schedule(name: str, task: Task, slots: str, work: Path) -> dict[str, Any]:
    """Outcomes on fresh hosts of the schedule that is best on others, and of no seed."""
    names = resolve_slots(task.host, SLOTS[slots])
    task = replace(task, host=replace(task.host, slot_names=names))
    best = (-1.0, 1.0, 1.0, 0)
    for host in HOST_RATES[1:]:
        for seed in SEED_RATES:
            file = work / f"{name} {slots} {host} {seed}.json"
            choice = kept(file, partial(scores, rated(task, host, seed), PLANS, False))
            utility = np.array(choice["utility"]).mean(0)
            best = max(best, (float(utility.max()), host, seed, int(utility.argmax())))
    _, host, seed, plan = best
    chosen = (NEVER, PLANS[plan])[: 1 + (plan > 0)]
    fresh = scores(rated(task, host, seed), chosen, True)
    return {"plan": PLANS[plan].name, "rates": (host, seed), **fresh}


def static(name: str, task: Task, work: Path) -> dict[str, Any]:
    """Outcomes on fresh hosts of the static width and rate that are best on others."""
    small, best = task.host.parameter_count, (-1.0, 1.0, 1.0)
    for factor in (1.0, *FACTORS):
        for host in HOST_RATES:
            wide = rated(wider(task, factor), host, 1.0)
            file = work / f"{name} static {factor} {host}.json"
            choice = kept(file, partial(scores, wide, (NEVER,), False))
            price = task.price * np.log(wide.host.parameter_count / small)
            best = max(best, (float(np.mean(choice["utility"])) - price, factor, host))
    _, factor, host = best
    wide = rated(wider(task, factor), host, 1.0)
    fresh = scores(wide, (NEVER,), True)
    price = task.price * np.log(wide.host.parameter_count / small)
    utility = (np.array(fresh["utility"]) - price).tolist()
    added = [[float(wide.host.parameter_count - small)]] * len(utility)
    plan = f"{factor:g} times as wide"
    return fresh | {"utility": utility, "added": added, "plan": plan, "rates": (host, 1.0)}


def by_split(values: list[list[float]]) -> np.ndarray:
    """The mean of the last plan over the hosts of each split, in percent."""
    return 100.0 * np.array(values)[:, -1].reshape(SPLITS, FRESH_HOSTS).mean(1)


def points(values: np.ndarray) -> tuple[float, ...]:
    """The mean and its interval."""
    estimate = interval(values[None])
    return tuple(float(x[0]) for x in (estimate.mean, estimate.low, estimate.high))


def text(values: np.ndarray, form: str) -> str:
    """``points`` as text."""
    return points_text(points(values), form)


def schedule_rows(
    work: Path, wide_minus_static: dict[str, tuple[float, ...]]
) -> Iterator[tuple[str, ...]]:
    """A row for each host and way to grow; adds a difference of each host."""
    for name, task in HOSTS.items():
        results = {
            slots: kept(work / f"{name} {slots}.json", partial(schedule, name, task, slots, work))
            for slots in SLOTS
        }
        results["static"] = kept(work / f"{name} static.json", partial(static, name, task, work))
        plain = by_split([row[:1] for row in results["residual"]["utility"]])
        wide, network = (by_split(results[way]["utility"]) for way in ("wide", "static"))
        wide_minus_static[name] = points(wide - network)
        for way, result in results.items():
            utility, accuracy = by_split(result["utility"]), by_split(result["accuracy"])
            added = float(np.array(result["added"])[:, -1].mean())
            host, seed = result["rates"]
            yield (
                name, way, result["plan"], f"{host:g}, {seed:g}", text(accuracy, ".1f"),
                f"{added:,.0f}", text(utility - plain, "+.1f"),
            )  # fmt: skip


def gains(task: Task, slots: str, seed: int, work: Path) -> list[float]:
    """Gain in points of each round of a training with PPO."""
    TASKS[task.name] = lambda: task
    common = {
        "task": task.name, "seed": seed, "threads": 1, "telemetry_level": "minimal",
        "telemetry_dir": str(work / "runs"), "slots": SLOTS[slots],
    }  # fmt: skip
    return [one.gain for one in run_training(unflatten(common), "ppo").rounds]


def training_rows(
    name: str, work: Path, minus_default: dict[str, tuple[float, ...]]
) -> Iterator[tuple[str, ...]]:
    """A row for each set of slots of a host; adds the difference of each from the default."""
    plain, task = None, HOSTS[name]
    for slots in SLOTS:
        runs = [
            kept(work / f"ppo {name} {slots} {seed}.json", partial(gains, task, slots, seed, work))
            for seed in SEEDS
        ]
        last = np.array([fmean(run[-LAST:]) for run in runs])
        every = np.array([fmean(run) for run in runs])
        plain = plain or (last, every)
        minus_default[slots] = points(last - plain[0])
        yield (
            name, f"`--slots {' '.join(SLOTS[slots])}`" if SLOTS[slots] else "default",
            text(last, ".1f"), text(last - plain[0], "+.1f") if slots != "residual" else "",
            text(every, ".1f"), text(every - plain[1], "+.1f") if slots != "residual" else "",
        )  # fmt: skip


def main() -> None:
    """Play and train what is missing, and print the page."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/spanning_slots"))
    arguments = parser.parse_args()
    schedules, trainings = [], []
    networks: dict[str, tuple[float, ...]] = {}
    differences: dict[str, dict[str, tuple[float, ...]]] = {name: {} for name in HOSTS}
    for row in schedule_rows(arguments.work, networks):
        schedules.append(row)
        print(*row, flush=True)
    for name in HOSTS:
        for row in training_rows(name, arguments.work, differences[name]):
            trainings.append(row)
            print(*row, flush=True)
    heads = (
        "host", "grows", "plan", "rates of host and seed", "test accuracy, %",
        "parameters added", "utility minus no growth, points",
    )  # fmt: skip
    ppo_heads = (
        "host", "slots", f"gain in the last {LAST} of 30 rounds", "minus default",
        "mean gain of all rounds", "minus default",
    )  # fmt: skip
    minus_static = ", ".join(f"{name} {points_text(x)}" for name, x in networks.items())
    about = [" ".join(part.split()) for part in (__doc__ or "").split("\n\n")[2:]]
    parts = [
        about[0], table(heads, schedules),
        f"Utility of *wide* minus that of *static*, paired by split: {minus_static}.",
        about[1], table(ppo_heads, trainings),
        f"{made_on('1 and 2 threads')}.",
    ]  # fmt: skip
    figures = {
        "seeds": len(SEEDS),
        "wide_minus_static": networks,
        "ppo_minus_default": differences["convolutions 4-8"],
        "ppo_minus_default_perceptron": differences["perceptron 4-4"],
    }
    publish("spanning_slots", "Slots in which layers become wider", parts, arguments.write, figures)


if __name__ == "__main__":
    main()
