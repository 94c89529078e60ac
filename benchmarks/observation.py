"""What a policy could see on adaptation, and what it is worth to know.

    OMP_NUM_THREADS=1 python benchmarks/observation.py --write      # about 15 minutes on one core

A shift is of the images, of the channels of a block, or of the labels, and each has a slot at which
growing helps most. Two questions, on draws for training:

1. How often does a random forest tell the slot after the shift, from which part of the observation?
2. What is a rule worth that is told the slot, at the start of the episode or at the shift?

Hosts are spread over splits of the data; intervals are over these splits.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from populations import SPLITS, parts
from reporting import kept, made_on, new_parser, publish, table
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import GroupKFold, cross_val_score
from torch import Tensor

from esper.runtime.tasks import Task
from esper.simic.growth.environment import GrowthEnv
from esper.tamiyo.baselines import Actor, NeverActor, blueprint_of
from esper.tamiyo.policy.features import (
    EMPTY_SLOT_SIGNALS,
    HOST_FEATURES,
    SEED_SIGNALS,
    SIZE_FEATURES,
    SLOT_FEATURES,
)
from esper.tamiyo.try_and_keep import RuleActor, Trial, TryAndKeepActor, trial_of
from esper_lab.ladder_steps import points, points_text
from esper_lab.plans import POSITIONS
from esper_lab.play import Outcome, Population, Rules, play, tasks_of_groups

Floats = NDArray[np.float64]
DELAYS = 1, 3
"""Steps after the shift at which the forest looks."""
FAMILY = "adaptation"
CLASSES = {0: "images or first block", 1: "second block", 2: "labels"}
"""Slot at which growing helps, and what shifts."""


def right_slots(task: Task) -> frozenset[int]:
    """Return the slots of the levels that shift: none without a shift."""
    if task.drift is None:
        return frozenset()
    shifts = task.drift.data.make.args[0]  # type: ignore[attr-defined]
    last = len(task.host.slots) - 1
    found = {last if shift.kind in ("permuted", "swapped") else 0 for shift in shifts}
    if task.drift.channels is not None:
        found.add(task.drift.channels.block)
    return frozenset(found)


def shift_step(task: Task) -> int:
    """Return the step of the shift, the length of the episode without one."""
    return (
        task.episode_length
        if task.drift is None
        else round(task.drift.earliest * task.episode_length)
    )


@dataclass(frozen=True)
class Told:
    """A rule that is told the right slots.

    Attributes:
        name: what it does, in words.
        size: size of its seeds, see ``plans.PlannedSeed``.
        at_shift: whether it is told at the shift, else at the start.
    """

    name: str
    size: float
    at_shift: bool


TOLD = (
    Told("smallest seed, told at the start", 0.0, False),
    Told("larger seed, told at the start", 1 / 3, False),
    Told("smallest seed, told at the shift", 0.0, True),
    Told("larger seed, told at the shift", 1 / 3, True),
)


class ToldActor(TryAndKeepActor):
    """Try and keep in the slots that it is told.

    Args:
        trial: see ``TryAndKeepActor``.
        wrong: slots in which it never plants, bool ``[N, S]``.
    """

    def __init__(self, trial: Trial, wrong: Tensor):
        super().__init__(trial)
        self.wrong = wrong

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        super().begin(environments, episode)
        self._plantings |= self.wrong


def told_actor(env: GrowthEnv) -> Actor:
    """Return an actor whose member m of every group plays ``TOLD[m]``."""
    tasks = [task for task in tasks_of_groups(env) for _ in TOLD]
    rules = [rule for _ in tasks_of_groups(env) for rule in TOLD]
    trial = trial_of([task.host.slots for task in tasks], env.slot_count, env.config.episode_length)
    wrong = torch.ones(len(tasks), env.slot_count, dtype=torch.bool)
    for row, (task, rule) in enumerate(zip(tasks, rules, strict=True)):
        for s, slot in enumerate(task.host.slots):
            trial.blueprint[row, s] = blueprint_of(rule.size, slot)
        wrong[row, list(right_slots(task))] = False
    starts = [shift_step(t) + 1 if r.at_shift else 0 for t, r in zip(tasks, rules, strict=True)]
    return ToldActor(replace(trial, start=torch.tensor(starts)), wrong)


def played(
    population: Population, actor: Callable[[GrowthEnv], Actor], members: int, place: Path
) -> tuple[Floats, Floats]:
    """Return test utility ``[H, M]`` and features ``[H, T, F]``, from ``place`` if kept there."""

    def make() -> dict[str, object]:
        found: Outcome = play(population, actor, members, Rules(one_at_a_time=True))
        return {"utility": found.test_utility.tolist(), "features": found.features.tolist()}

    stored = kept(place, make)
    return np.array(stored["utility"]), np.array(stored["features"])


def feature_groups() -> dict[str, list[int]]:
    """Return the columns of each part of the observation."""
    names = [*HOST_FEATURES, *(f"{name}@{place}" for place in POSITIONS for name in SLOT_FEATURES)]

    def columns(chosen: set[str]) -> list[int]:
        return [i for i, name in enumerate(names) if name.partition("@")[0] in chosen]

    scores = {name for name in HOST_FEATURES if "loss" in name or "accuracy" in name}
    return {
        "static: sizes, price, time": columns({*SIZE_FEATURES, "progress", "remaining", "depth"}),
        "scores: losses and accuracies": columns(scores),
        "seed signals": columns(set(SEED_SIGNALS)),
        "empty-slot signals": columns(set(EMPTY_SLOT_SIGNALS)),
        "all": list(range(len(names))),
    }


def accuracy(features: Floats, tasks: list[Task], delay: int, columns: list[int]) -> float:
    """Return the cross-validated share of hosts whose slot a forest tells.

    It sees the observation ``delay`` steps after the shift, and its change since the step before.
    Hosts without a shift, with one in the first step, or with two levels are left out.
    """
    rows, slots, draws = [], [], []
    for h, task in enumerate(tasks):
        right, shift = right_slots(task), shift_step(task)
        if len(right) == 1 and 0 < shift < task.episode_length - delay:
            now, before = features[h, shift + delay, columns], features[h, shift - 1, columns]
            rows.append(np.concatenate([now, now - before]))
            slots.append(next(iter(right)))
            draws.append(task.name)
    forest = RandomForestClassifier(300, random_state=0)
    # A draw occurs on several splits; its price alone would give it away.
    folds = GroupKFold(5)
    found = cross_val_score(forest, np.array(rows), np.array(slots), groups=draws, cv=folds)
    return float(found.mean())


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser: argparse.ArgumentParser = new_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=256)
    parser.add_argument("--work", type=Path, default=Path("runs/observation"))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hosts = parts(FAMILY, FAMILY, (arguments.hosts, SPLITS), SPLITS, arguments.threads)[0].training
    tasks, work = list(hosts.tasks), arguments.work / str(arguments.hosts)
    never, empty = played(hosts, lambda env: NeverActor(), 1, work / "never.json")
    rule, seeds = played(
        hosts,
        lambda env: RuleActor(lambda: env.current_slots, env.config.episode_length),
        1,
        work / "rule.json",
    )
    told, _ = played(hosts, told_actor, len(TOLD), work / "told.json")
    single = [next(iter(right)) for right in map(right_slots, tasks) if len(right) == 1]
    frequent = max(single.count(slot) for slot in CLASSES) / len(single)
    looks = {
        f"{name}, {what}": [accuracy(values, tasks, delay, columns) for delay in DELAYS]
        for what, values in (("nothing grown", empty), ("a seed in every slot", seeds))
        for name, columns in feature_groups().items()
    }
    splits = [task.split_seed for task in tasks]
    gains = {
        "try and keep": rule[:, 0] - never[:, 0],
        **{r.name: told[:, m] - never[:, 0] for m, r in enumerate(TOLD)},
        "try and keep, nothing without a shift": np.where(
            [bool(right_slots(task)) for task in tasks], rule[:, 0] - never[:, 0], 0.0
        ),
        "best of these on each host": np.column_stack([never, rule, told]).max(1) - never[:, 0],
    }
    reference = gains["try and keep"]
    figures = {
        name: {"gain": points(gain, splits), "difference": points(gain - reference, splits)}
        for name, gain in gains.items()
    }
    page = (
        f"{arguments.hosts} training draws of `{FAMILY}` on {SPLITS} splits of the data; 95 % "
        "intervals are over the splits.",
        "## Which slot?",
        f"Share of {len(single)} draws with one shifted level (of "
        + ", ".join(f"{text}: {single.count(slot)}" for slot, text in CLASSES.items())
        + ") on which a random forest tells the slot, cross-validated over draws. The most "
        f"frequent slot alone: {100 * frequent:.0f} %.",
        table(
            ("what it sees", *(f"{delay} steps after the shift, %" for delay in DELAYS)),
            [(name, *(f"{100 * x:.0f}" for x in found)) for name, found in looks.items()],
        ),
        "## What knowing it is worth",
        "Points of test utility above never growing, and their difference from try and keep, "
        "which plants the smallest seed in every slot at the start and is told nothing.",
        table(
            ("rule", "gain", "difference"),
            [
                (name, points_text(found["gain"]), points_text(found["difference"]))
                for name, found in figures.items()
            ],
        ),
        f"{made_on()}.",
    )
    stored = {"looks": looks, "frequent": frequent, "gains": figures}
    title = f"What a policy could see on {FAMILY}"
    publish("observation", title, page, arguments.write, stored)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
