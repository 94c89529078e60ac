"""The ladder: a policy between the controls, all on the same fresh hosts, on the test split.

Rules are tuned on training hosts. The clairvoyant is the plan that is best for each host with one
data order, scored with another order, so that it is not paid for luck.
"""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import msgspec
import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import UsageError
from esper.leyline.evaluation import Evaluation, Rung
from esper.runtime.tasks import SUITES, find_all
from esper.simic.evaluation.plans import Plan, library
from esper.simic.evaluation.play import Outcome, Population, Rules, play, play_plans
from esper.simic.evaluation.rules import RULES, Known
from esper.simic.evaluation.trials import TRIALS, TrialPlan, trial_actor
from esper.simic.evaluation.without_looking import blind_twin, yoked
from esper.simic.growth.collect import Actor
from esper.simic.growth.environment import GrowthEnv
from esper.simic.run.disk import replace_synced
from esper.simic.tools.grow import GrowingPolicy

TRAINING_HOSTS, FRESH_HOSTS = 0, 1 << 20
"""Identities of the first training host and of the first fresh host."""
ORDERS = 1, 2
"""Seeds of the two data orders."""
RULE = "rule"
"""Name of a policy that stands for the controls alone."""

OnBatch = Callable[[str, int, int], None]
"""Called with a stage, the episodes of a finished batch, and all episodes of the stage."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of an evaluation.

    Attributes:
        training: hosts on which rules are tuned.
        fresh: hosts on which everything is scored.
    """

    training: Population
    fresh: Population


def evaluation_hosts(
    suite: str, training: int, fresh: int, threads: int, split_seed: int = 0
) -> Hosts:
    """Training and fresh hosts of a suite, its tasks in turn.

    A family's fresh hosts are held-out draws. Their data are split with ``split_seed``, see
    ``Task.with_split``.

    Raises:
        UsageError: there is no such suite, or its tasks differ in their horizon.
    """
    held_out = f"{suite}_held_out"

    def population(name: str, count: int, first: int) -> Population:
        tasks = [task.with_split(split_seed) for task in find_all([name])]
        horizons = {(task.episode_length, task.max_batches, task.batch_size) for task in tasks}
        if len(horizons) > 1:
            raise UsageError(
                f"suite: the tasks of {name} differ in episode length or minibatches; name one task"
            )
        drawn = tuple(tasks[i % len(tasks)] for i in range(count))
        return Population(drawn, first, threads=threads)

    return Hosts(
        population(suite, training, TRAINING_HOSTS),
        population(held_out if held_out in SUITES else suite, fresh, FRESH_HOSTS),
    )


def evaluate(
    policy: str,
    suite: str,
    hosts: Hosts,
    random_plans: int,
    members: int,
    work: Path,
    on_batch: OnBatch = lambda stage, done, total: None,
) -> Evaluation:
    """Play the controls and a policy on the same hosts.

    Args:
        policy: a run directory, ``heuristic``, ``never``, or ``RULE`` for the controls alone.
        suite: name of the suite, for the result.
        hosts: see ``evaluation_hosts``.
        random_plans: number of random schedules in the library.
        members: episodes per host of a policy that samples its actions.
        work: directory in which finished stages are kept; they are not repeated.
        on_batch: see ``OnBatch``.

    Raises:
        UsageError: the policy does not exist or has no usable checkpoint, or a finished stage
            cannot be read.
    """
    grower = None if policy == RULE else GrowingPolicy.named(policy)
    if grower is not None and grower.learned:
        grower.agent(hosts.fresh.seed)  # its errors should come before the controls are played
    plans = library(random_plans)
    scored = replace(hosts.fresh, data_seed=ORDERS[0])
    played = play_library(hosts, plans, work, on_batch)
    rungs = controls(played, hosts, plans)
    if grower is not None:
        rungs += policy_rungs(grower, scored, members, on_batch)
    tasks = [task.label for task in hosts.fresh.tasks]
    names = [plan.name for plan in plans]
    splits = [task.split_seed for task in hosts.fresh.tasks if task.split_seed is not None]
    return Evaluation(
        policy=policy,
        suite=suite,
        training_hosts=len(hosts.training.tasks),
        tasks=tasks,
        plans=names,
        rungs=rungs,
        split_seed=splits[0] if splits else None,
    )


def policy_rungs(
    grower: GrowingPolicy, scored: Population, members: int, on_batch: OnBatch
) -> list[Rung]:
    """The rungs of a policy; those of a learned one with its blind twin and its yoked copy.

    A learned policy follows the rules of growth of its run. It is played greedily and, ``members``
    times per host, with sampled actions.
    """
    world = grower.settings.world
    rules = Rules(world.one_at_a_time, world.strict_gates, world.max_seeds)
    ways = {"greedy": 1, "sampled": members} if grower.learned else {grower.name: 1}
    rungs = []
    for way, count in ways.items():

        def actor(env: GrowthEnv, greedy: bool = way == "greedy") -> Actor:
            return grower.actor(env, greedy)

        variants: dict[str, Callable[[GrowthEnv], Actor]] = {f"policy, {way}": actor}
        if grower.learned:
            variants[f"blind twin, {way}"] = blind_twin(actor)
            variants[f"yoked copy, {way}"] = yoked(actor)
        for name, made in variants.items():
            total = len(scored.tasks) * count
            done = partial(_done, on_batch, name, total)
            outcome = play(scored, made, count, rules, done)
            rungs.append(_rung(name, outcome, policy=made is actor))
    return rungs


def _done(on_batch: OnBatch, stage: str, total: int, episodes: int) -> None:
    on_batch(stage, episodes, total)


@dataclass(frozen=True, slots=True)
class Played:
    """Outcomes of the library of plans and of the variants of try-and-keep.

    Attributes:
        tuning: plans on the training hosts.
        fresh: plans on the fresh hosts.
        again: plans on the fresh hosts with another data order.
        tuning_trials, fresh_trials: try-and-keep on either.
    """

    tuning: Outcome
    fresh: Outcome
    again: Outcome
    tuning_trials: Outcome
    fresh_trials: Outcome


def play_library(hosts: Hosts, plans: tuple[Plan, ...], work: Path, on_batch: OnBatch) -> Played:
    """Play the plans and the variants of try-and-keep; arguments as for ``evaluate``."""
    scored, again = (replace(hosts.fresh, data_seed=order) for order in ORDERS)
    tuning = replace(hosts.training, data_seed=ORDERS[0])

    def stage(name: str, chosen: Population, trials: bool) -> Outcome:
        hosts = len(chosen.tasks)
        done = partial(_done, on_batch, name, hosts * (len(TRIALS) if trials else len(plans)))

        def make() -> Outcome:
            if trials:
                return play(chosen, trial_actor, len(TRIALS), on_batch=done)
            return play_plans(chosen, plans, done)

        identity = _digest(chosen, TRIALS if trials else plans)
        return kept_outcome(work / f"{name}-{hosts}-hosts-{identity}.npz", make)

    return Played(
        tuning=stage("tuning", tuning, False),
        fresh=stage("fresh", scored, False),
        again=stage("again", again, False),
        tuning_trials=stage("tuning-trials", tuning, True),
        fresh_trials=stage("fresh-trials", scored, True),
    )


def controls(played: Played, hosts: Hosts, plans: tuple[Plan, ...]) -> list[Rung]:
    """The rungs of all controls, from the bottom up."""
    tasks = np.array([task.label for task in hosts.fresh.tasks])
    known = known_plans(played.tuning, hosts.training.tasks[0].episode_length, plans)

    def constant(plan: int) -> NDArray[np.int_]:
        return np.full(len(tasks), plan)

    at_once = [i for i, plan in enumerate(plans) if plan.at_once and plan.start == 0.0]
    everything = at_once[int(played.tuning.test_utility.mean(0)[at_once].argmax())]
    chosen = {"never grow": constant(0), "everything at step 0": constant(everything)}
    for name, tune in RULES.items():
        chosen[name] = tune(known)(played.fresh.features)
    if len(set(tasks)) > 1:
        utility = played.again.test_utility
        best = {name: int(utility[tasks == name].mean(0).argmax()) for name in set(tasks)}
        chosen["best plan per task"] = np.array([best[name] for name in tasks])
    chosen["clairvoyant per host"] = played.again.test_utility.argmax(1)
    rungs = [_rung(name, played.fresh, plan) for name, plan in chosen.items()]
    variant = int(played.tuning_trials.test_utility.mean(0).argmax())
    trial = _rung("try and keep", played.fresh_trials, constant(variant))
    # Its choice is not a plan of the library.
    rungs.insert(2 + len(RULES), msgspec.structs.replace(trial, chosen=None))
    return rungs


def _rung(
    name: str, outcome: Outcome, chosen: NDArray[np.int_] | None = None, policy: bool = False
) -> Rung:
    """One member per host if ``chosen``, int64 ``[H]``, else the mean over the members."""
    rows = np.arange(len(outcome.added))

    def column(values: NDArray[np.float64]) -> list[float]:
        found = values.mean(1) if chosen is None else values[rows, chosen]
        return found.tolist()

    return Rung(
        name=name,
        policy=policy,
        utility=column(outcome.test_utility),
        validation=column(outcome.validation_utility),
        added=column(outcome.added),
        chosen=None if chosen is None else chosen.tolist(),
    )


def known_plans(outcome: Outcome, length: int, plans: tuple[Plan, ...]) -> Known:
    """What rules are tuned on: the outcome of the plans on training hosts.

    Args:
        outcome: outcome of the plans.
        length: steps per episode.
        plans: the library.
    """
    starts = np.array([min(length, round(plan.start * length)) for plan in plans])
    return Known(outcome.test_utility, outcome.features, starts, tuple(p.kind for p in plans))


def kept_outcome(path: Path, make: Callable[[], Outcome]) -> Outcome:
    """The outcome stored at ``path``; made and stored there if there is none.

    Raises:
        UsageError: the file cannot be read.
    """
    if not path.exists():
        outcome = make()
        buffer = io.BytesIO()
        arrays = {name: getattr(outcome, name).astype(np.float32) for name in Outcome.__slots__}
        np.savez_compressed(buffer, **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(path, buffer.getvalue())
    try:
        with np.load(path) as stored:
            return Outcome(**{name: stored[name].astype(float) for name in Outcome.__slots__})
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise UsageError(f"work: cannot read {path} ({error}); remove the file") from error


def _digest(population: Population, members: tuple[Plan, ...] | tuple[TrialPlan, ...]) -> str:
    """Identity of a stage: another one of the same size must not be taken for it."""
    tasks = [
        (task.name, task.summary, task.host.summary, task.rent, task.learning_rate, task.decay)
        + (task.max_gradient_norm, task.weight_decay, task.host_learning_rate)
        + (task.episode_length, task.max_batches, task.split_seed)
        for task in population.tasks
    ]
    place = (population.first, population.seed, population.data_seed)
    return hashlib.sha256(repr((tasks, place, members)).encode()).hexdigest()[:12]
