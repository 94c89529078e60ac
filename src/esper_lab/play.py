"""Playing policies on a population of hosts, each policy on the same hosts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.transfer import CPU
from esper.runtime.tasks import Task
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig, Step
from esper.tamiyo.baselines import Actor
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.precision import Precision
from esper_lab.plans import NEVER, POSITIONS, Plan, schedule, slot_at

Floats = NDArray[np.float64]
ROWS = 512
"""Environments per batch of hosts; more would not fit into the cache."""


@dataclass(frozen=True, slots=True)
class Population:
    """Hosts to play on.

    Attributes:
        tasks: the task of each host; hosts that are played together must agree in their horizon.
        first: identity of the first host; identities determine initial weights and data order.
        seed: root seed.
        data_seed: seed of the data order, see ``GrowthConfig``.
        threads: CPU threads.
    """

    tasks: tuple[Task, ...]
    first: int = 0
    seed: int = 1
    data_seed: int | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of an evaluation.

    Attributes:
        training: hosts on which rules are tuned.
        fresh: hosts on which everything is scored.
    """

    training: Population
    fresh: Population


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of growth, see ``GrowthConfig``.

    Attributes:
        one_at_a_time: whether a seed may germinate only while no other seed develops.
        strict_gates: whether seeds must also show an improvement to advance.
        max_seeds: limit of living seeds per environment; that of the task if None.
    """

    one_at_a_time: bool = True
    strict_gates: bool = False
    max_seeds: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcomes at the last step of H hosts under M members, ``[H, M]`` each.

    Scores are expected accuracies of the committed hosts, in [0, 1]; utility is score minus price.

    Attributes:
        test_utility, validation_utility: utility with the score of either split.
        test_score, validation_score: expected accuracy.
        test_accuracy: share of correct predictions.
        added: parameters of the fossilised seeds.
        features: what the first member observed in each step, ``[H, T, F]``: host features, then
            the slot features at each of ``plans.PLACES``, whatever the number of slots.
    """

    test_utility: Floats
    validation_utility: Floats
    test_score: Floats
    validation_score: Floats
    test_accuracy: Floats
    added: Floats
    features: Floats

    @classmethod
    def join(cls, parts: Sequence["Outcome"], axis: int) -> "Outcome":
        """The outcomes of further hosts (axis 0), or of further members (axis 1)."""
        names = [name for name in cls.__slots__ if axis == 0 or name != "features"]
        outcome = {name: np.concatenate([getattr(p, name) for p in parts], axis) for name in names}
        return cls(**({"features": parts[0].features} | outcome))

    def members(self, begin: int, end: int) -> "Outcome":
        """The outcomes of the members ``begin`` to ``end``, with the features of the first."""
        names = [name for name in self.__slots__ if name != "features"]
        return replace(self, **{name: getattr(self, name)[:, begin:end] for name in names})


def play_plans(
    population: Population,
    plans: tuple[Plan, ...],
    on_batch: Callable[[int], None] = lambda episodes: None,
) -> Outcome:
    """Play every plan on every host; member m is plan m, and the first plan must be ``NEVER``.

    Arguments as for ``play``.

    Raises:
        ValueError: the first plan is another.
    """
    if plans[0] is not NEVER:
        raise ValueError("the first plan must be NEVER, whose features are recorded")
    in_turn = [i for i, plan in enumerate(plans) if not plan.at_once]
    at_once = [i for i, plan in enumerate(plans) if plan.at_once]
    parts = []
    for indices in filter(None, (in_turn, at_once)):
        group = tuple(plans[i] for i in indices)

        def actor(env: GrowthEnv, group: tuple[Plan, ...] = group) -> Actor:
            rows = [schedule(group, task) for task in tasks_of_groups(env)]
            return ScheduleActor(Schedule.concatenate(rows))

        rules = Rules(one_at_a_time=indices is in_turn)
        parts.append(play(population, actor, len(group), rules, on_batch))
    outcome = Outcome.join(parts, axis=1)
    order = np.argsort([*in_turn, *at_once])
    return Outcome(
        **{
            name: getattr(outcome, name) if name == "features" else getattr(outcome, name)[:, order]
            for name in Outcome.__slots__
        }
    )


def play(
    population: Population,
    actor: Callable[[GrowthEnv], Actor],
    members: int,
    rules: Rules = Rules(),
    on_batch: Callable[[int], None] = lambda episodes: None,
) -> Outcome:
    """Play a policy on every host.

    Hosts are played in batches of at most ``ROWS`` environments and of nearly equal size.

    Args:
        population: the hosts.
        actor: makes the actor of an environment of consecutive hosts.
        members: environments per host; they differ in seeds' weights and the policy's draws.
        rules: rules of growth.
        on_batch: called with the number of episodes of every finished batch.
    """
    outcomes = []
    hosts = len(population.tasks)
    batches = -(-hosts // max(1, ROWS // members))
    ends = [hosts * batch // batches for batch in range(batches + 1)]
    for begin, end in pairwise(ends):
        tasks = population.tasks[begin:end]
        outcomes.append(_batch(population, begin, tasks, actor, members, rules))
        on_batch(len(tasks) * members)
    return Outcome.join(outcomes, axis=0)


def _batch(
    population: Population,
    begin: int,
    tasks: tuple[Task, ...],
    actor: Callable[[GrowthEnv], Actor],
    members: int,
    rules: Rules,
) -> Outcome:
    different = tuple(dict.fromkeys(tasks))
    config = GrowthConfig(
        seed=population.seed,
        data_seed=population.data_seed,
        group_size=members,
        episode_length=tasks[0].episode_length,
        max_batches=tasks[0].max_batches,
        batch_size=tasks[0].batch_size,
        max_seeds=rules.max_seeds or tasks[0].max_seeds,
        strict_gates=rules.strict_gates,
        one_at_a_time=rules.one_at_a_time,
        threads=population.threads,
    )
    first = (population.first + begin) * members
    identities = torch.arange(first, first + len(tasks) * members)
    assignment = torch.tensor([different.index(task) for task in tasks]).repeat_interleave(members)
    env = GrowthEnv(different, identities, config, Precision("cpu"), CPU, assignment=assignment)
    last: list[Step] = []

    def keep(t: int, actions: torch.Tensor, step: Step) -> None:
        last[:] = [step]

    rollout = collect(env, actor(env), 0, keep)
    report = last[0].report
    assert report.test is not None
    host, slots = (
        part[:, ::members] for part in (rollout.observation.host, rollout.observation.slots)
    )
    counts = [len(task.host.slots) for task in tasks]
    indices = torch.tensor([[slot_at(p, count) for p in POSITIONS.values()] for count in counts])
    group = slots[:, torch.arange(len(tasks))[:, None], indices]
    features = torch.cat([host, group.flatten(2)], 2).transpose(0, 1)

    def table(values: torch.Tensor) -> Floats:
        return values.double().view(len(tasks), members).numpy()

    return Outcome(
        test_utility=table(env.utility(report.test.expected, report.added_parameters)),
        validation_utility=table(env.utility(report.score, report.added_parameters)),
        test_score=table(report.test.expected),
        validation_score=table(report.score),
        test_accuracy=table(report.test.accuracy),
        added=table(report.added_parameters),
        features=features.double().numpy(),
    )


def tasks_of_groups(env: GrowthEnv) -> list[Task]:
    """The task of each group of an environment with assigned tasks."""
    assert env.assignment is not None
    return [env.tasks[index] for index in env.assignment[:: env.config.group_size].tolist()]
