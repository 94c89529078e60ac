"""Does a trained policy beat the rules? Trains controllers and places them among the controls.

    python benchmarks/suite.py --write                            # the training suite
    python benchmarks/suite.py --suites digits_shift              # a single task
    python benchmarks/suite.py --suites adaptation --envs 128 --rounds 250 --group-baseline

For every suite: PPO with several seeds, then each policy greedily and with sampled actions, with
its misled twin and its yoked copy, beside all controls (``esper evaluate``) on the same fresh hosts
of the suite and of its held-out tasks, on the test split. Rules are tuned on training hosts of the
suite. Everything is kept under ``--work``: an interrupted run is resumed from its last checkpoint,
and what is finished is not repeated.
"""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from ladders import Standing, best_rule, control_figures, ladder_table, standing, standing_text
from populations import SPLITS, controls, parts
from reporting import kept, made_on, publish, table
from runs import Run, Settings, study_parser, trained

from esper.runtime.tasks import FAMILIES
from esper.scripts.entry import run_guarded
from esper.simic.tools.grow import GrowingPolicy
from esper_lab.controls import ORDERS
from esper_lab.evaluation import CLAIRVOYANT, Evaluation, Rung
from esper_lab.hosts import held_out_of
from esper_lab.ladder import join_rungs, policy_rungs
from esper_lab.ladder_steps import points_text, steps
from esper_lab.play import Hosts, Stages

WAYS = "greedy", "sampled"


def played(run: Run, found: list[Hosts], members: int, path: Path) -> list[Rung]:
    """Return the rungs of a trained policy on all parts, from ``path`` if they are kept there."""

    def tell(stage: str, done: int, total: int) -> None:
        print(f"{run.path.parent.name} {stage}: {done} more of {total} episodes", flush=True)

    def make() -> list[dict[str, Any]]:
        grower, stages = GrowingPolicy.named(str(run.path)), Stages(path.parent, tell)
        by_part = [
            policy_rungs(grower, replace(part.fresh, data_seed=ORDERS[0]), members, stages)
            for part in found
        ]
        return [msgspec.to_builtins(join_rungs(same)) for same in zip(*by_part, strict=True)]

    return msgspec.convert(kept(path, make), list[Rung])


def target_page(
    name: str, found: Evaluation, policies: list[list[Rung]]
) -> tuple[list[str], dict[str, Any]]:
    """Return the paragraphs and the figures of the fresh hosts of one suite."""
    standings = [standing(way, policies, found) for way in WAYS]
    hosts, splits = len(found.tasks), len(set(found.splits))
    parts = [
        f"## Fresh hosts of {name}",
        f"{hosts} hosts in {splits} splits of the data.",
        ladder_table(steps(found), standings),
        *(standing_text(one, len(policies)) for one in standings),
        by_controller(standings),
    ]
    if len(set(found.tasks)) > 1:
        parts.append(by_task(found, policies))
    figures = {
        "hosts": hosts,
        "splits": splits,
        "controls": control_figures(found),
        "policies": {one.way: asdict(one) for one in standings},
    }
    return parts, figures


def by_controller(standings: list[Standing]) -> str:
    """Return a table of the gain of each controller."""
    count = len(standings[0].by_controller)
    rows = [(one.way, *(f"{gain:+.1f}" for gain in one.by_controller)) for one in standings]
    return table(("gain of each policy", *range(1, count + 1)), rows)


def by_task(found: Evaluation, policies: list[list[Rung]]) -> str:
    """Return a table of gains by task: the best rule over all tasks, policy and clairvoyant."""
    rule = best_rule(found).name
    lines = []
    for task in dict.fromkeys(found.tasks):
        where = np.array(found.tasks) == task
        own = {step.rung.name: step.gain for step in steps(found, where)}
        ways = (standing(way, policies, found, where).gain for way in WAYS)
        cells = (own[rule], *ways, own[CLAIRVOYANT])
        lines.append((f"`{task}`", *(points_text(cell, "+.1f") for cell in cells)))
    heads = (rule, *(f"policy, {way}" for way in WAYS), CLAIRVOYANT)
    return table(("gain by task", *heads), lines)


def studied(suite: str, arguments: Any) -> tuple[list[str], dict[str, Any]]:
    """Train and place the controllers of one suite; return the page and its figures."""
    work, splits = arguments.work / suite, arguments.splits
    common: Settings = {
        "task": [suite],
        "envs": arguments.envs,
        "group_size": arguments.group_size,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "entropy": arguments.entropy,
        "group_baseline": arguments.group_baseline,
    }
    runs = {
        seed: trained("ppo", {**common, "seed": seed}, work / f"ppo-seed{seed}")
        for seed in arguments.seeds
    }
    episodes = arguments.envs * arguments.rounds
    minutes = np.array([run.seconds for run in runs.values()]) / 60.0
    page = [
        f"{len(runs)} policies, each trained on {suite} for {episodes} episodes "
        f"({arguments.rounds} rounds of {arguments.envs} environments, {minutes.mean():.1f} "
        f"minutes). Rules are tuned on {arguments.training_hosts} training hosts of {suite}. All "
        "figures are points of utility at the last step of an episode, on the test split unless "
        "the column says otherwise. Brackets hold 95 % intervals: over splits, or over hosts where "
        "there is one split, and for policies over the trained policies too (two levels)."
    ]
    figures: dict[str, Any] = {}
    stages = work / f"{splits}-splits"
    # A family has enough draws to be measured on those that are held out alone.
    targets = [held_out_of(suite)] if suite in FAMILIES else [suite, held_out_of(suite)]
    for target in filter(None, targets):
        counts = (arguments.training_hosts, arguments.hosts)
        found = parts(suite, target, counts, splits, arguments.threads)
        ladder = controls(target, found, arguments.random_plans, stages)
        size = f"{arguments.hosts}-hosts-{arguments.members}-members-{arguments.rounds}-rounds"
        policies = [
            played(run, found, arguments.members, stages / f"{target}-seed{seed}-{size}.json")
            for seed, run in runs.items()
        ]
        own, figures[target] = target_page(target, ladder, policies)
        page += own
    overview = {"policies": len(runs), "episodes": episodes, "plans": len(ladder.plans)}
    return page, {"suite": suite, **overview, "fresh": figures}


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = study_parser(__doc__, "suite", seeds=8, rounds=32)
    parser.add_argument("--suites", nargs="+", default=["suite"], help="suites, families or tasks")
    parser.add_argument("--envs", type=int, default=28)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--group-baseline", action="store_true")
    parser.add_argument("--hosts", type=int, default=80, help="fresh hosts of each suite")
    parser.add_argument("--training-hosts", type=int, default=112)
    parser.add_argument("--splits", type=int, default=SPLITS, help="0: the tasks as they are")
    parser.add_argument("--random-plans", type=int, default=24)
    parser.add_argument("--members", type=int, default=2, help="episodes per host, if sampled")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for suite in arguments.suites:
        page, figures = studied(suite, arguments)
        title = f"Policies trained on {suite} between the controls"
        publish(suite, title, [*page, f"{made_on()}."], arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_guarded(lambda arguments: main(), []))
