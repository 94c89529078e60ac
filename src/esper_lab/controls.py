"""The controls of the ladder: what is played, what is tuned on it, and the rungs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from esper.simic.growth.environment import GrowthEnv
from esper.tamiyo.baselines import Actor, blueprint_of
from esper.tamiyo.try_and_keep import RuleSettings, Trial, TryAndKeepActor
from esper.tamiyo.try_in_turn import ORDERS as SLOT_ORDERS
from esper.tamiyo.try_in_turn import TryInTurnActor, Turns, turns_of
from esper_lab import evaluation as names
from esper_lab import rules
from esper_lab.baselines import BASELINES, factors_of, play_baseline, population_of
from esper_lab.evaluation import Rung, best_rung
from esper_lab.plans import SIZES, Plan
from esper_lab.play import (
    Hosts,
    OnBatch,
    Outcome,
    Population,
    Rules,
    Stages,
    digest,
    hosts_of,
    play,
    play_plans,
    tasks_of_groups,
)
from esper_lab.rules import RULES, TrainingOutcomes


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """A variant of try-and-keep.

    Attributes:
        size: size of the seeds, see ``plans.PlannedSeed``.
        start: part of the episode after which it plants.
        keep: most seeds that it keeps.
        decision: part of the episode after which it prunes and fossilises, one slot a step; it
            begins in time for all slots, see ``RuleSettings``.
    """

    size: float
    start: float
    keep: int
    decision: float

    def decision_step(self, length: int, slots: int) -> int:
        """The first step of the decision in an episode of ``length`` steps."""
        return RuleSettings(decision=self.decision).decision_step(length, slots)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A variant of try-and-keep where one seed may live: slots are tried in turn.

    Attributes:
        size, start, patience, order: see ``try_in_turn.turns_of``.
    """

    size: float
    start: float
    patience: float
    order: str


TRIALS = tuple(TrialPlan(*values) for values in product(SIZES, (0.0, 0.25), (1, 99), (0.5, 1.0)))
TURNS = tuple(
    TurnPlan(*values) for values in product(SIZES[:2], (0.0, 0.25), (0.3, 0.45), SLOT_ORDERS)
)


def variants_of(population: Population) -> tuple[TrialPlan, ...] | tuple[TurnPlan, ...]:
    """The variants for hosts of one horizon: ``TURNS`` where one seed may live."""
    return TURNS if population.tasks[0].max_seeds == 1 else TRIALS


def trial_actor(env: GrowthEnv) -> Actor:
    """Member m of every group plays variant m of those of its hosts, see ``variants_of``."""
    return _turns(env) if env.config.max_seeds == 1 else _trials(env)


def _turns(env: GrowthEnv) -> Actor:
    slots = [task.host.slots for task in tasks_of_groups(env)]
    length = env.config.episode_length
    rows = [
        turns_of(slots, env.slot_count, length, p.size, p.start, p.patience, p.order) for p in TURNS
    ]

    def by_member(name: str) -> torch.Tensor:
        return torch.stack([getattr(row, name) for row in rows], 1).flatten(0, 1)

    return TryInTurnActor(Turns(*map(by_member, Turns.__slots__)))


def _trials(env: GrowthEnv) -> Actor:
    length = env.config.episode_length
    pairs = list(product(tasks_of_groups(env), TRIALS))
    blueprint = torch.zeros(env.count, env.slot_count, dtype=torch.long)
    for row, (task, plan) in enumerate(pairs):
        for s, slot in enumerate(task.host.slots):
            blueprint[row, s] = blueprint_of(plan.size, slot)
    decision = [plan.decision_step(length, len(task.host.slots)) for task, plan in pairs]
    return TryAndKeepActor(
        Trial(
            blueprint=blueprint, decision=torch.tensor(decision),
            start=torch.tensor([round(plan.start * length) for _, plan in pairs]),
            keep=torch.tensor([plan.keep for _, plan in pairs]),
        )
    )  # fmt: skip


ORDERS = 1, 2
"""Seeds of the two data orders."""


@dataclass(frozen=True, slots=True)
class ControlOutcomes:
    """Outcomes of the library of plans, of the variants of try-and-keep and of the baselines.

    Attributes:
        tuning: plans on the training hosts.
        fresh: plans on the fresh hosts.
        again: plans on the fresh hosts with another data order.
        tuning_trials, fresh_trials: try-and-keep on either, in turn and then at once.
        baselines: baselines on the fresh hosts, by name, each with one member: the rate that was
            best on the training hosts.
    """

    tuning: Outcome
    fresh: Outcome
    again: Outcome
    tuning_trials: Outcome
    fresh_trials: Outcome
    baselines: dict[str, Outcome]


def play_controls(
    hosts: Hosts, plans: tuple[Plan, ...], work: Path, on_batch: OnBatch
) -> ControlOutcomes:
    """Play the plans, the variants of try-and-keep and the baselines.

    Args:
        hosts: see ``hosts.evaluation_hosts``.
        plans: the library.
        work: directory in which finished stages are kept; they are not repeated.
        on_batch: see ``OnBatch``.

    Raises:
        UsageError: a finished stage cannot be read.
    """
    tuning = replace(hosts.training, data_seed=ORDERS[0])
    fresh, again = (replace(hosts.fresh, data_seed=order) for order in ORDERS)
    stages = Stages(work, on_batch)
    return ControlOutcomes(
        tuning=_of_plans(stages, "tuning", tuning, plans),
        fresh=_of_plans(stages, "fresh", fresh, plans),
        again=_of_plans(stages, "again", again, plans),
        tuning_trials=_of_trials(stages, "tuning-trials", tuning),
        fresh_trials=_of_trials(stages, "fresh-trials", fresh),
        baselines={
            name: _of_baseline(stages, name, tuning, fresh)
            for name in BASELINES
            if population_of(name, tuning) and population_of(name, fresh)
        },
    )


def _of_plans(
    stages: Stages, name: str, population: Population, plans: tuple[Plan, ...]
) -> Outcome:
    return stages.load_or_play(
        name, population, plans, lambda done: play_plans(population, plans, done)
    )


def _of_trials(stages: Stages, name: str, population: Population) -> Outcome:
    """Try-and-keep with one developing seed at a time, then with all at once."""
    variants = variants_of(population)

    def outcome_of(stage: str, rules: Rules) -> Outcome:
        def make(done: Callable[[int], None]) -> Outcome:
            return play(population, trial_actor, len(variants), rules, done)

        return stages.load_or_play(stage, population, variants, make)

    in_turn, at_once = Rules(one_at_a_time=True), Rules(one_at_a_time=False)
    return Outcome.join([outcome_of(name, in_turn), outcome_of(f"{name}-at-once", at_once)], axis=1)


def _of_baseline(stages: Stages, name: str, tuning: Population, fresh: Population) -> Outcome:
    """The baseline on the fresh hosts, with the rate that is best on the training hosts."""

    def outcome(stage: str, population: Population, factors: tuple[float, ...]) -> Outcome:
        stand_in = population_of(name, population)
        trainings = [(None if stand_in is None else stand_in.tasks, factor) for factor in factors]

        def make(done: Callable[[int], None]) -> Outcome:
            return play_baseline(name, population, factors, done)

        return stages.load_or_play(f"{stage}-{name}", population, trainings, make)

    factors = factors_of(name)
    best = 0
    if len(factors) > 1:
        best = int(outcome("tuning", tuning, factors).test_utility.mean(0).argmax())
    return outcome("fresh", fresh, (factors[best],))


def control_rungs(outcomes: ControlOutcomes, hosts: Hosts, plans: tuple[Plan, ...]) -> list[Rung]:
    """The rungs of all controls, from the bottom up."""
    tasks = np.array([task.label for task in hosts.fresh.tasks])
    training = training_outcomes(outcomes.tuning, hosts.training.tasks[0].episode_length, plans)

    def of_plan(name: str, plan: int | NDArray[np.int_]) -> Rung:
        return rung_of(name, outcomes.fresh, np.broadcast_to(plan, len(tasks)))

    at_once = [i for i, plan in enumerate(plans) if plan.at_once and plan.start == 0.0]
    everything = at_once[int(outcomes.tuning.test_utility.mean(0)[at_once].argmax())]
    features = outcomes.fresh.features
    rule_rungs = [of_plan(name, tune(training)(features)) for name, tune in RULES.items()]
    rule_rungs.append(_try_and_keep(outcomes))
    rungs = [of_plan(names.NEVER_GROW, 0), of_plan(names.EVERYTHING, everything)]
    if all(task.host_learning_rate == 0.0 for task in hosts.fresh.tasks):
        looking = best_rung(rule_rungs, names.LOOKING)
        assert looking is not None
        distance = np.abs(outcomes.fresh.added.mean(0)[at_once] - np.mean(looking.added))
        rungs.append(of_plan("adapters everywhere", at_once[int(distance.argmin())]))
    rungs += [rung_of(name, outcome) for name, outcome in outcomes.baselines.items()]
    rungs += rule_rungs
    if len(set(tasks)) > 1:
        utility = outcomes.again.test_utility
        best = {name: int(utility[tasks == name].mean(0).argmax()) for name in set(tasks)}
        rungs.append(of_plan("best plan per task", np.array([best[name] for name in tasks])))
    rungs.append(of_plan(names.CLAIRVOYANT, outcomes.again.test_utility.argmax(1)))
    return rungs


def _try_and_keep(outcomes: ControlOutcomes) -> Rung:
    variant = int(outcomes.tuning_trials.test_utility.mean(0).argmax())
    choices = np.full(len(outcomes.fresh_trials.added), variant)
    # Its choice is not a plan of the library.
    rung = rung_of(names.TRY_AND_KEEP, outcomes.fresh_trials, choices)
    return msgspec.structs.replace(rung, chosen=None)


def rung_of(
    name: str, outcome: Outcome, choices: NDArray[np.int_] | None = None, policy: bool = False
) -> Rung:
    """One member per host by ``choices``, int64 ``[H]``, or the mean over the members."""
    rows = np.arange(len(outcome.added))

    def column(values: NDArray[np.float64]) -> list[float]:
        numbers = values.mean(1) if choices is None else values[rows, choices]
        return numbers.tolist()

    return Rung(
        name=name, policy=policy, utility=column(outcome.test_utility),
        validation=column(outcome.validation_utility), added=column(outcome.added),
        chosen=None if choices is None else choices.tolist(), score=column(outcome.test_score),
    )  # fmt: skip


def training_outcomes(outcome: Outcome, length: int, plans: tuple[Plan, ...]) -> TrainingOutcomes:
    """What rules are tuned on: the outcome of the plans on training hosts.

    Args:
        outcome: outcome of the plans.
        length: steps per episode.
        plans: the library.
    """
    starts = np.array([min(length, round(plan.start * length)) for plan in plans])
    return TrainingOutcomes(
        outcome.test_utility, outcome.features, starts, tuple(p.kind for p in plans)
    )


def controls_identity(hosts: Hosts, plans: tuple[Plan, ...]) -> str:
    """Identity of the rungs of all controls: hosts, plans, rules and baselines."""
    trainings = {}
    for name in BASELINES:
        stand_ins = [population_of(name, part) for part in (hosts.training, hosts.fresh)]
        tasks = [stand_in and stand_in.tasks for stand_in in stand_ins]
        trainings[name] = factors_of(name), tasks
    variants = variants_of(hosts.training)
    rule_settings = (list(RULES), rules.CUTS, rules.FOLDS, rules.TREES, variants)
    populations = hosts_of(hosts.training), hosts_of(hosts.fresh)
    return digest(populations, ORDERS, plans, rule_settings, trainings)
