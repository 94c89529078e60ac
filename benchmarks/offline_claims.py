"""What learning from records is worth: cloning, weighting by advantages, and a warm start."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from populations import parts
from reporting import kept
from runs import Run, Settings, trained

from esper.karn.store import read_events
from esper.leyline.config.offline import ImitationConfig, OfflineConfig, OfflineMethod
from esper.leyline.events import TrainingFinished
from esper.simic.growth.environment import GrowthEnv
from esper.simic.offline.offline_run import learn_offline
from esper.simic.tools.grow import GrowingPolicy
from esper.simic.training import growth_trainee
from esper.tamiyo.baselines import Actor, NeverActor
from esper_lab.plans import LibraryActor, Plan, library
from esper_lab.play import Hosts, Rules, play, play_plans

Floats = NDArray[np.float64]
METHODS: tuple[OfflineMethod, ...] = ("bc", "awr")
"""What learns from the mixed record."""
WINDOW = 5
"""Rounds in the mean of a learning curve."""


@dataclass(frozen=True)
class Study:
    """Sizes of the study, and where it is kept.

    Attributes:
        suite: suite of the hosts.
        envs, group_size: environments of every run.
        record_rounds: rounds of every recorded run.
        rounds: rounds of PPO, cold and warm.
        hosts: fresh hosts on which policies are measured.
        training_hosts: hosts on which the best fixed schedule is chosen.
        members: episodes per fresh host.
        epochs: most epochs of learning from records.
        threads: CPU threads.
        work: folder of its runs.
    """

    suite: str
    envs: int
    group_size: int
    record_rounds: int
    rounds: int
    hosts: int
    training_hosts: int
    members: int
    epochs: int
    threads: int
    work: Path

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Study":
        """Return the study that the arguments of the command describe."""
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})

    @property
    def name(self) -> str:
        """What tells results of other sizes apart."""
        counts = (self.envs, self.record_rounds, self.hosts, self.members, self.epochs)
        return f"{self.suite}-{'-'.join(map(str, counts))}"

    def hosts_of(self) -> list[Hosts]:
        """Return training and fresh hosts, see ``populations.parts``."""
        counts = self.training_hosts, self.hosts
        return parts(self.suite, self.suite, counts, 4, self.threads)

    def settings(self, seed: int, rounds: int) -> Settings:
        """Return the settings of a run in environments."""
        return {
            "task": [self.suite],
            "envs": self.envs,
            "group_size": self.group_size,
            "rounds": rounds,
            "seed": seed,
            "threads": self.threads,
        }


def studied(study: Study, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the figures of all claims; what is finished is not repeated."""
    plan = best_plan(study)
    path = study.work / f"fresh-{study.name}-{plan.name}.json"
    fresh = kept(path, lambda: _fresh(study, plan))
    return {
        "plan": plan.name,
        "schedule_gain": fresh["schedule"],
        "seeds": [_seed(study, plan, seed) for seed in seeds],
    }


def best_plan(study: Study) -> Plan:
    """Return the plan with the highest mean test utility on the training hosts.

    Only plans that grow one seed at a time, as PPO must with its default settings.
    """
    plans = tuple(plan for plan in library() if not plan.at_once)

    def make() -> list[float]:
        hosts = study.hosts_of()[0].training
        return [float(x) for x in play_plans(hosts, plans).test_utility.mean(0)]

    path = study.work / f"plans-{study.suite}-{study.training_hosts}.json"
    return plans[int(np.argmax(kept(path, make)))]


def _fresh(study: Study, plan: Plan) -> dict[str, float]:
    """Return the gain of the schedule on the fresh hosts."""
    return {"schedule": gain(study, lambda env: plan_actor(env, plan))}


def plan_actor(env: GrowthEnv, plan: Plan) -> Actor:
    """Return an actor that follows one plan on every host."""
    actor = LibraryActor(lambda: env.current_tasks, env.config.episode_length)
    actor.plans = (plan,)
    return actor


def gain(study: Study, actor: Callable[[GrowthEnv], Actor]) -> float:
    """Return the gain on the fresh hosts in points: test utility above never growing."""
    path = study.work / f"never-{study.name}.json"
    never = kept(path, lambda: utility(study, lambda env: NeverActor()).tolist())
    return 100.0 * float(np.mean(utility(study, actor) - np.array(never)))


def utility(study: Study, actor: Callable[[GrowthEnv], Actor]) -> Floats:
    """Return the test utility on each fresh host, the mean over its episodes."""
    populations = [part.fresh for part in study.hosts_of()]
    return np.concatenate(
        [play(hosts, actor, study.members, Rules()).test_utility.mean(1) for hosts in populations]
    )


def _seed(study: Study, plan: Plan, seed: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    place = study.work / f"{study.suite}-seed{seed}"

    def recorded(policy: str) -> Path:
        settings = study.settings(seed, study.record_rounds) | {"record": True}
        return trained(policy, settings, place / f"record-{policy}-{study.record_rounds}").path

    with patch.object(growth_trainee, "control", lambda policy, env: plan_actor(env, plan)):
        schedule = recorded("schedule")
    mixture = [recorded(policy) for policy in ("random", "heuristic", "ppo")]
    common: Settings = {"epochs": study.epochs, "seed": seed, "threads": study.threads}
    size = f"{study.record_rounds}-{study.epochs}"
    clone = learned(ImitationConfig(records=(str(schedule),), **common), place / f"clone-{size}")
    mixed = {"records": tuple(map(str, mixture)), **common}
    policies = {"clone": clone, "early ppo": mixture[-1]}
    for method in METHODS:
        place_of = place / f"{method}-{size}"
        policies[method] = learned(OfflineConfig(method=method, **mixed), place_of)
    figures: dict[str, Any] = {"seed": seed}
    for name, run in policies.items():
        path = place / f"gain-{name.replace(' ', '-')}-{study.name}.json"
        figures[name] = kept(path, partial(ways, study, run))
        print(f"seed {seed}, {name}: {figures[name]}", flush=True)
    settings = study.settings(seed, study.rounds)
    cold = trained("ppo", settings, place / f"cold-{study.rounds}")
    start = {"initial_policy": str(clone.resolve())}
    warm = trained("ppo", settings | start, place / f"warm-{study.rounds}")
    return figures | {"cold": curve(cold), "warm": curve(warm)}


def ways(study: Study, run: Path) -> dict[str, float]:
    """Return the gain of a policy that draws its actions, and of one that takes the likeliest."""
    grower = GrowingPolicy.named(str(run))
    return {
        "sampled": gain(study, lambda env: grower.actor(env, greedy=False)),
        "greedy": gain(study, lambda env: grower.actor(env, greedy=True)),
    }


def learned(config: ImitationConfig, folder: Path) -> Path:
    """Return the finished run of learning from records in ``folder``: reused, or made now."""
    for run in sorted(folder.glob("*")):
        ends = list(read_events(run, TrainingFinished)) if (run / "events.jsonl").exists() else []
        if ends and ends[-1].status == "finished":
            return run
    kind = type(config)
    return learn_offline(kind(**(asdict(config) | {"telemetry_dir": str(folder)}))).path


def curve(run: Run) -> list[float]:
    """Return the gain of every round in points, the mean over its environments."""
    return [float(np.mean(outcome.gain)) for outcome in run.outcomes]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of up to ``WINDOW`` rounds up to each round."""
    return [float(np.mean(values[max(0, i + 1 - WINDOW) : i + 1])) for i in range(len(values))]


def rounds_until(values: Sequence[float], level: float) -> int | None:
    """Return the first round, from 1, whose smoothed gain is at least ``level``; None if none is.

    Counted from the first whole window on: a mean of fewer rounds could reach it by chance.
    """
    for i, value in enumerate(smoothed(values)):
        if i + 1 >= min(WINDOW, len(values)) and value >= level:
            return i + 1
    return None
