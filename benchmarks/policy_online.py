"""What do policies learn that act while they learn? PPO and IMPALA, by setting and by budget.

    python benchmarks/policy_online.py --write     # an hour and a half on a core; resumable

Each variant trains on ``one_seed`` and then acts greedily on 256 held-out draws, beside the best
fixed schedule. Warm variants start from the policy that ships, which learned from records.
Finished variants are kept under ``--work``.
"""

import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from policy_further import (
    FURTHER_SPLITS,
    further_hosts,
    greedy_utilities,
    ladder_hosts,
    played_rules,
    work_of,
)
from reporting import RESULTS, kept, made_on, new_parser, publish, table

from esper.leyline.config import defaults_of, unflatten
from esper.leyline.metrics import Metric
from esper.runtime.task import HELD_OUT_DRAWS
from esper.simic.run.checkpoint import load_checkpoint
from esper.simic.tools.grow import GrowingPolicy
from esper.simic.training.vectorized import run_training
from esper_lab.ladder_steps import points, points_text
from esper_lab.play import Population

Values = NDArray[np.float64]
FAMILY, SHIPPED = "one_seed", "keep-or-move"
SCHEDULE = "best fixed schedule"
SCORED = range(HELD_OUT_DRAWS + 1000, HELD_OUT_DRAWS + 1256)
"""Draws on which all are scored, which ``policy.py`` does not use."""
ENVS = 128
SCRATCH, WARM, LONG = (12, 24), (12,), (12, 24, 48, 96)
"""Rounds after which a variant is scored. A round is ``ENVS`` episodes."""
COMMON: dict[str, Any] = {
    "task": [FAMILY],
    "envs": ENVS,
    "group_size": 4,
    "group_baseline": True,
    "entropy": 0.02,
    "lstm_hidden": 64,
    "keep_checkpoints": 100,
    "checkpoint_every": 6,
    "telemetry_level": "minimal",
    "compile": "off",
    "seed": 1,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of a training, beside ``COMMON``."""

    name: str
    rounds: tuple[int, ...] = SCRATCH
    algorithm: str = "ppo"
    settings: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("PPO, baseline of the group", LONG),
    Variant("PPO, baseline of the critic alone", settings={"group_baseline": False}),
    Variant("IMPALA", algorithm="impala"),
    Variant("entropy 0", settings={"entropy": 0.0}),
    Variant("10 epochs", settings={"ppo_epochs": 10}),
    Variant("1 minibatch instead of 4", settings={"minibatches": 1}),
    Variant("groups of 16", settings={"group_size": 16}),
)
WARM_VARIANTS = tuple(
    Variant(f"rate {rate:g}", WARM, settings={"initial_policy": SHIPPED, "learning_rate": rate})
    for rate in (1e-3, 1e-5)
)


def trained(variant: Variant, folder: Path, threads: int) -> dict[str, Any]:
    """Train a variant; return its run directory, and what its critic explained in the end."""
    name = "".join(c if c.isalnum() else "-" for c in variant.name)
    run = folder / name

    def make() -> dict[str, Any]:
        shutil.rmtree(run, ignore_errors=True)  # of an interrupted start
        own = {"rounds": variant.rounds[-1], "threads": threads, "name": name}
        settings = COMMON | own | {"telemetry_dir": str(folder)} | variant.settings
        defaults = defaults_of("impala" if variant.algorithm == "impala" else "growth")
        config = unflatten(settings, defaults)
        summary = run_training(config, variant.algorithm)
        if summary.status != "finished":
            raise SystemExit(summary.exit_code)
        late = [one.metrics[Metric.EXPLAINED_VARIANCE_WITHIN_STEP] for one in summary.rounds[-6:]]
        return {"explained": float(np.mean(late)), "run": name}

    return cast(dict[str, Any], kept(folder / f"{name}.json", make))


def scored(run: Path, rounds: int, hosts: Population) -> list[float]:
    """Test utility of a run's policy after some rounds, acting greedily, on each host."""
    path = run / "checkpoints" / f"{rounds:06d}"
    grower = replace(GrowingPolicy.named(str(run)), checkpoint=load_checkpoint(path))
    return greedy_utilities(hosts, grower)


def curves(
    variants: tuple[Variant, ...], work: Path, hosts: Population, schedule: Values
) -> dict[str, dict[str, Any]]:
    """By variant: points above the schedule after each of its numbers of rounds."""
    found = {}
    for variant in variants:
        training = trained(variant, work / "online", hosts.threads)
        run = work / "online" / training["run"]
        above = {}
        for rounds in variant.rounds:
            path = run.parent / f"{run.name}-{rounds}.json"
            values = np.array(kept(path, partial(scored, run, rounds, hosts)))
            above[rounds * ENVS] = points(values - schedule, splits_of(hosts))
            print(variant.name, rounds * ENVS, above[rounds * ENVS], flush=True)
        found[variant.name] = {"above": above, "explained": training["explained"]}
    return found


def splits_of(hosts: Population) -> list[int | None]:
    """The split of each host's data."""
    return [task.split_seed for task in hosts.tasks]


def curve_table(found: dict[str, dict[str, Any]]) -> str:
    """Points above the schedule by variant and number of episodes."""
    counts = sorted({count for one in found.values() for count in one["above"]})
    rows = [
        (
            name,
            *(points_text(one["above"][n], "+.1f") if n in one["above"] else "" for n in counts),
            f"{one['explained']:.2f}",
        )
        for name, one in found.items()
    ]
    return table(("", *(f"{count:,} episodes" for count in counts), "explained variance"), rows)


def drawn(found: dict[str, dict[str, Any]], references: dict[str, float], path: Path) -> None:
    """Draw points above the schedule against the number of episodes."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, one in found.items():
        counts, above = list(one["above"]), [value[0] for value in one["above"].values()]
        axes.plot(counts, above, marker="o", markersize=3, label=name)
    for name, value in references.items():
        axes.axhline(value, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(name, (ENVS * SCRATCH[0], value), va="bottom", fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("episodes of training")
    axes.set_ylabel("points above the best fixed schedule")
    axes.legend(frameon=False, fontsize=6, ncols=2)
    figure.savefig(path)


def main() -> int:
    """Train and score the variants; return the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    work, threads = work_of(FAMILY, arguments.work), arguments.threads
    torch.set_num_threads(1)
    _, known = ladder_hosts(FAMILY, threads)
    hosts = further_hosts(FAMILY, threads, SCORED)
    folder = work / "online"
    rules = kept(
        folder / "rules.json", lambda: played_rules(known.training, hosts, work / "further")
    )
    schedule = np.array(rules[SCHEDULE])
    shipped = GrowingPolicy.named(SHIPPED)
    policy = kept(folder / "shipped.json", partial(greedy_utilities, hosts, shipped))
    splits = splits_of(hosts)
    references = {
        "never growing": points(np.array(rules["never"]) - schedule, splits),
        "one look": points(np.array(rules["one look"]) - schedule, splits),
        f"`{SHIPPED}`": points(np.array(policy) - schedule, splits),
    }
    scratch = curves(VARIANTS, work, hosts, schedule)
    warm = curves(WARM_VARIANTS, work, hosts, schedule)
    if arguments.write:
        lines = {name: value[0] for name, value in references.items() if name != "never growing"}
        drawn(scratch, lines, RESULTS / "policy_online.svg")
    page = [
        f"One controller per variant, trained on `{FAMILY}` with {ENVS} environments, and scored "
        f"on {len(hosts.tasks)} held-out hosts in {len(FURTHER_SPLITS)} splits: points of test "
        "utility above the best fixed schedule, greedy actions. Brackets hold 95 % intervals over "
        "splits; a second controller of the same variant would differ by more. The last column "
        "is the share of the variance of the returns within a time step that the critic explains "
        "at the end of training.",
        table(("", "points"), [(n, points_text(v, "+.1f")) for n, v in references.items()]),
        "## From random weights",
        "Unless the name says otherwise: PPO with the baseline of the group in addition to the "
        "critic, groups of 4, 4 epochs of 4 minibatches, entropy 0.02, an LSTM of 64 units.",
        "![Points above the best fixed schedule against episodes](policy_online.svg)",
        curve_table(scratch),
        f"## PPO from `{SHIPPED}`",
        "The learning rate is 0.001 by default.",
        curve_table(warm),
        f"{made_on('other work on the machine')}.",
    ]
    figures = {"references": references, "scratch": scratch, "warm": warm}
    publish("policy_online", "What acting teaches", page, arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
