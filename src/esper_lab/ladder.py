"""The ladder: a policy between the controls, all on the same fresh hosts, on the test split.

Rules are tuned on training hosts. The clairvoyant is the plan that is best for each host with one
data order, scored with another order, so that it is not paid for luck.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from esper.simic.growth.environment import GrowthEnv
from esper.simic.tools.grow import GrowingPolicy
from esper.tamiyo.baselines import Actor
from esper_lab.controls import (
    ORDERS,
    control_rungs,
    controls_identity,
    play_controls,
    rung_of,
    variants_of,
)
from esper_lab.copies import with_copies
from esper_lab.evaluation import COLUMNS, Evaluation, Rung
from esper_lab.hosts import SPLITS, evaluation_hosts
from esper_lab.plans import NEVER, Plan, library
from esper_lab.play import Hosts, OnBatch, Outcome, Population, Rules, Stages, play, play_plans
from esper_lab.shipped_controls import ShippedControls, difference_text, shipped_controls
from esper_lab.without_looking import Recording, misled_twin, record, yoked_copy

RULE = "rule"
"""Name of a policy that stands for the controls alone."""

ActorFactory = Callable[[GrowthEnv], Actor]
"""Makes the actor of an environment of consecutive hosts."""


def usable_controls(
    suite: str, training: int, fresh: int, splits: Sequence[int] = SPLITS, slots: Sequence[str] = ()
) -> tuple[ShippedControls | None, str | None]:
    """The controls that ship with Esper if they are those of an evaluation, or why they are not.

    Args:
        suite: name of the suite.
        training, fresh: numbers of hosts; fresh ones are the first of those that were shipped.
        splits, slots: seeds of the splits of the fresh hosts, and the slots in which they grow.

    Returns:
        The controls, None if they must be played; a line that says why, None if none are shipped.

    Raises:
        UsageError: the file is damaged.
    """
    controls = shipped_controls(suite)
    if controls is None:
        return None, None

    def of_other_hosts() -> bool:
        parts = evaluation_hosts(suite, controls.training_hosts, controls.hosts, threads=1)
        return [controls_identity(hosts, library()) for hosts in parts] != [controls.identity]

    why = None
    if tuple(splits) != SPLITS:
        why = f"have the splits {', '.join(map(str, SPLITS))}"
    elif slots:
        why = "grow in the slots of the tasks"
    return controls.usable(training, fresh, of_other_hosts, why)


def evaluate(
    policy: str,
    suite: str,
    parts: Sequence[Hosts],
    members: int,
    work: Path,
    on_batch: OnBatch = lambda stage, done, total: None,
    controls: ShippedControls | None = None,
    further: tuple[Plan, ...] = (),
) -> Evaluation:
    """Play the controls and a policy on the same hosts.

    Args:
        policy: a run directory, ``heuristic``, ``never``, or ``RULE`` for the controls alone.
        suite: name of the suite, for the result.
        parts: see ``hosts.evaluation_hosts``.
        members: episodes per host of a policy that samples its actions.
        work: directory in which finished stages are kept; they are not repeated.
        on_batch: see ``OnBatch``; of several parts, the stages say which.
        controls: those of these hosts, or of more, that need not be played; of one part only.
        further: plans beside those of the library.

    Raises:
        UsageError: the policy does not exist or has no usable checkpoint, or a finished stage
            cannot be read.
    """
    grower = None if policy == RULE else GrowingPolicy.named(policy)
    if grower is not None and grower.learned:
        grower.agent(parts[0].fresh.seed)  # its errors should come before the controls are played
    plans, origin = (*library(), *further), None
    evaluations = []
    for number, hosts in enumerate(parts, 1):
        suffix = f", part {number} of {len(parts)}" if len(parts) > 1 else ""

        def report(stage: str, done: int, total: int, suffix: str = suffix) -> None:
            on_batch(f"{stage}{suffix}", done, total)

        population = replace(hosts.fresh, data_seed=ORDERS[0])
        if controls is None:
            rungs = control_rungs(play_controls(hosts, plans, work, report), hosts, plans)
        else:
            rungs = controls.first(len(population.tasks))
            utilities = play_plans(population, (NEVER,)).test_utility[:, 0].tolist()
            origin = f"{controls.origin}; {difference_text(utilities, rungs[0])}"
        rungs = with_copies(rungs, population.tasks)
        if grower is not None:
            rungs += policy_rungs(grower, population, members, Stages(work, report))
        variants = variants_of(hosts.training)
        tasks = hosts.fresh.tasks
        evaluation = Evaluation(
            policy, suite, _tuned_on(parts), [task.label for task in tasks],
            [plan.name for plan in plans], rungs, [task.split_seed for task in tasks],
            shipped=origin, rule_episodes=_tuned_on(parts) * (len(plans) + 2 * len(variants)),
            policy_episodes=None if grower is None else grower.episodes,
            rents=[task.price for task in tasks],
        )  # fmt: skip
        evaluations.append(evaluation)
    return join_parts(evaluations)


def join_parts(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluations of several parts as one; rungs that a part lacks are left out.

    What does not differ by host is that of the first part.
    """
    tables = [{rung.name: rung for rung in part.rungs} for part in evaluations]
    first = evaluations[0]
    names = [rung.name for rung in first.rungs if all(rung.name in table for table in tables)]
    columns = {
        name: [value for part in evaluations for value in getattr(part, name)]
        for name in ("tasks", "splits", "rents")
    }
    rungs = [join_rungs([table[name] for table in tables]) for name in names]
    return msgspec.structs.replace(first, rungs=rungs, **columns)


def join_rungs(rungs: Sequence[Rung]) -> Rung:
    """The same rung on the hosts of several parts as one."""
    columns = {
        name: [value for rung in rungs for value in getattr(rung, name)]
        for name in COLUMNS
        if getattr(rungs[0], name) is not None
    }
    return msgspec.structs.replace(rungs[0], **columns)


def _tuned_on(parts: Sequence[Hosts]) -> int:
    """Number of training hosts; parts may share theirs."""
    populations: list[Population] = []
    for hosts in parts:
        if hosts.training not in populations:
            populations.append(hosts.training)
    return sum(len(population.tasks) for population in populations)


def policy_rungs(
    grower: GrowingPolicy, population: Population, members: int, stages: Stages
) -> list[Rung]:
    """The rungs of a policy; those of a learned one with its misled twin and its yoked copy.

    A learned policy follows the rules of growth of its run. It is played greedily and, ``members``
    times per host, with sampled actions. The policy and its yoked copy, which repeats its actions,
    are one stage.

    Raises:
        UsageError: a finished stage cannot be read.
    """
    world = grower.settings.world
    rules = Rules(world.one_at_a_time, world.strict_gates, world.max_seeds)
    ways = {"greedy": 1, "sampled": members} if grower.learned else {grower.name: 1}
    rungs = []
    for way, count in ways.items():

        def actor(env: GrowthEnv, greedy: bool = way == "greedy") -> Actor:
            return grower.actor(env, greedy)

        def outcomes_of(
            stage: str, actors: Sequence[ActorFactory], count: int = count
        ) -> list[Outcome]:
            players = [(grower.identity, rules, m) for m in range(len(actors) * count)]

            def make(done: Callable[[int], None]) -> Outcome:
                parts = [play(population, one, count, rules, done) for one in actors]
                return Outcome.join(parts, axis=1)

            outcome = stages.load_or_play(stage, population, players, make)
            ends = range(count, count * (len(actors) + 1), count)
            return [outcome.members(slice(end - count, end)) for end in ends]

        if not grower.learned:
            (alone,) = outcomes_of(f"{way} policy", [actor])
            rungs.append(rung_of(f"policy, {way}", alone, policy=True))
            continue
        recordings: list[Recording] = []
        pair = record(actor, recordings), yoked_copy(recordings)
        policy, copy = outcomes_of(f"{way} policy and yoked copy", pair)
        (twin,) = outcomes_of(f"{way} misled twin", [misled_twin(actor)])
        rungs.append(rung_of(f"policy, {way}", policy, policy=True))
        rungs += [rung_of(f"misled twin, {way}", twin), rung_of(f"yoked copy, {way}", copy)]
    return rungs
