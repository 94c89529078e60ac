"""The ladder: a policy between the controls, all on the same fresh hosts, on the test split.

Rules are tuned on training hosts. The clairvoyant is the plan that is best for each host with one
data order, scored with another order, so that it is not paid for luck.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from esper.leyline.evaluation import Evaluation, Rung
from esper.simic.evaluation.controls import (
    ORDERS,
    control_rungs,
    controls_identity,
    play_controls,
    rung_of,
)
from esper.simic.evaluation.hosts import SPLITS, evaluation_hosts
from esper.simic.evaluation.joining import joined
from esper.simic.evaluation.kept_stages import OnBatch, Stages
from esper.simic.evaluation.play import Hosts, Outcome, Population, Rules, play, play_plans
from esper.simic.evaluation.shipped_controls import ShippedControls, shipped_controls
from esper.simic.evaluation.trials import variants_of
from esper.simic.evaluation.without_looking import Recording, blind_twin, recorded, yoked
from esper.simic.growth.collect import Actor
from esper.simic.growth.environment import GrowthEnv
from esper.simic.tools.grow import GrowingPolicy
from esper.tamiyo.plans import NEVER, library

RULE = "rule"
"""Name of a policy that stands for the controls alone."""

Made = Callable[[GrowthEnv], Actor]
"""Makes the actor of an environment of consecutive hosts."""


def usable_controls(
    suite: str, training: int, fresh: int, random_plans: int, splits: Sequence[int] = SPLITS
) -> tuple[ShippedControls | None, str | None]:
    """The controls that ship with Esper if they are those of an evaluation, or why they are not.

    Args:
        suite: name of the suite.
        training: number of training hosts.
        fresh: number of fresh hosts; the first of those that were shipped.
        random_plans: number of random schedules in the library.
        splits: seeds of the splits of the fresh hosts.

    Returns:
        The controls, None if they must be played; a line that says why, None if none are shipped.

    Raises:
        UsageError: the file is damaged.
    """
    stored = shipped_controls(suite)
    if stored is None:
        return None, None

    def of_other_hosts() -> bool:
        parts = evaluation_hosts(suite, stored.training_hosts, stored.hosts, threads=1)
        return [controls_identity(hosts, library()) for hosts in parts] != [stored.identity]

    why = None
    if training != stored.training_hosts:
        why = f"were tuned on {stored.training_hosts} hosts"
    elif fresh > stored.hosts:
        why = f"are of {stored.hosts} hosts"
    elif random_plans > 0:
        why = "have no random schedules"
    elif tuple(splits) != SPLITS:
        why = f"have the splits {', '.join(map(str, SPLITS))}"
    elif of_other_hosts():
        why = "are of other tasks, plans or rules"
    if why is not None:
        return None, f"The controls are played here, because those that ship with Esper {why}."
    return stored, None


def evaluate(
    policy: str,
    suite: str,
    parts: Sequence[Hosts],
    random_plans: int,
    members: int,
    work: Path,
    on_batch: OnBatch = lambda stage, done, total: None,
    shipped: ShippedControls | None = None,
) -> Evaluation:
    """Play the controls and a policy on the same hosts.

    Args:
        policy: a run directory, ``heuristic``, ``never``, or ``RULE`` for the controls alone.
        suite: name of the suite, for the result.
        parts: see ``hosts.evaluation_hosts``.
        random_plans: number of random schedules in the library.
        members: episodes per host of a policy that samples its actions.
        work: directory in which finished stages are kept; they are not repeated.
        on_batch: see ``OnBatch``; of several parts, the stages say which.
        shipped: controls of these hosts, or of more, that need not be played; of one part only.

    Raises:
        UsageError: the policy does not exist or has no usable checkpoint, or a finished stage
            cannot be read.
    """
    grower = None if policy == RULE else GrowingPolicy.named(policy)
    if grower is not None and grower.learned:
        grower.agent(parts[0].fresh.seed)  # its errors should come before the controls are played
    plans, origin = library(random_plans), None
    found = []
    for number, hosts in enumerate(parts, 1):
        place = f", part {number} of {len(parts)}" if len(parts) > 1 else ""

        def told(stage: str, done: int, total: int, place: str = place) -> None:
            on_batch(f"{stage}{place}", done, total)

        scored = replace(hosts.fresh, data_seed=ORDERS[0])
        if shipped is None:
            rungs = control_rungs(play_controls(hosts, plans, work, told), hosts, plans)
        else:
            rungs = shipped.first(scored.tasks)
            origin = f"{shipped.origin}; {_compared(rungs[0], scored)}"
        if grower is not None:
            rungs += policy_rungs(grower, scored, members, Stages(work, told))
        variants = variants_of(hosts.training)
        found.append(
            Evaluation(
                policy=policy,
                suite=suite,
                training_hosts=_tuned_on(parts),
                tasks=[task.label for task in hosts.fresh.tasks],
                plans=[plan.name for plan in plans],
                rungs=rungs,
                splits=[task.split_seed for task in hosts.fresh.tasks],
                shipped=origin,
                rule_episodes=_tuned_on(parts) * (len(plans) + 2 * len(variants)),
                policy_episodes=None if grower is None else grower.episodes,
                rents=[task.price for task in hosts.fresh.tasks],
            )
        )
    return joined(found)


def _tuned_on(parts: Sequence[Hosts]) -> int:
    """Number of training hosts; parts may share theirs."""
    populations: list[Population] = []
    for hosts in parts:
        if hosts.training not in populations:
            populations.append(hosts.training)
    return sum(len(population.tasks) for population in populations)


def _compared(never: Rung, scored: Population) -> str:
    """How far hosts that were played elsewhere differ from those that are played here.

    Another processor rounds otherwise, which also changes the hosts that were trained before.
    """
    here = play_plans(scored, (NEVER,)).test_utility[:, 0]
    difference = round(100.0 * float(np.mean(here - np.array(never.utility))), 1) + 0.0
    return f"never growing differs here by {difference:+.1f} points"


def policy_rungs(
    grower: GrowingPolicy, scored: Population, members: int, stages: Stages
) -> list[Rung]:
    """The rungs of a policy; those of a learned one with its blind twin and its yoked copy.

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

        def played(stage: str, made: Sequence[Made], count: int = count) -> list[Outcome]:
            players = [(grower.identity, rules, m) for m in range(len(made) * count)]

            def make(done: Callable[[int], None]) -> Outcome:
                parts = [play(scored, one, count, rules, done) for one in made]
                return Outcome.join(parts, axis=1)

            outcome = stages.load_or_play(stage, scored, players, make)
            return [outcome.members(i * count, (i + 1) * count) for i in range(len(made))]

        if not grower.learned:
            (alone,) = played(f"{way} policy", [actor])
            rungs.append(rung_of(f"policy, {way}", alone, policy=True))
            continue
        recordings: list[Recording] = []
        pair = recorded(actor, recordings), yoked(recordings)
        policy, copy = played(f"{way} policy and yoked copy", pair)
        (blind,) = played(f"{way} blind twin", [blind_twin(actor)])
        rungs.append(rung_of(f"policy, {way}", policy, policy=True))
        rungs += [rung_of(f"blind twin, {way}", blind), rung_of(f"yoked copy, {way}", copy)]
    return rungs
