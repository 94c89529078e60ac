"""The controls on hosts of several splits of their data, played with a line per finished batch."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from esper.leyline.actions import HEAD_WIDTHS
from esper_lab.evaluation import Evaluation
from esper_lab.hosts import hosts_by_horizon
from esper_lab.ladder import RULE, evaluate
from esper_lab.plans import Plan, PlannedSeed
from esper_lab.play import Hosts

SPLITS = 8
"""Default number of splits."""
_LATEST = 0.7


def parts(
    training: str, fresh: str, counts: tuple[int, int], splits: int, threads: int
) -> list[Hosts]:
    """Return the hosts of an evaluation on ``splits`` splits, see ``hosts_by_horizon``."""
    return hosts_by_horizon(training, fresh, counts, range(splits), threads)


def random_plans(count: int) -> tuple[Plan, ...]:
    """Plans whose slots, sizes, starts, styles and tempos are drawn."""
    return tuple(_random_plan(number) for number in range(count))


def _random_plan(number: int) -> Plan:
    draws = np.random.default_rng([2, number])
    seeds = tuple(
        PlannedSeed(
            position,
            float(draws.random()),
            float(_LATEST * draws.random()),
            int(draws.integers(HEAD_WIDTHS["style"])),
            int(draws.integers(HEAD_WIDTHS["tempo"])),
        )
        for position in (0.0, 0.5, 1.0)
        if draws.random() < 0.5
    )
    return Plan(f"random {number}", seeds)


def controls(suite: str, found: Sequence[Hosts], draws: int, work: Path) -> Evaluation:
    """Play the controls on all parts, with ``draws`` random plans among them.

    Finished stages in ``work`` are not repeated.
    """

    def tell(stage: str, done: int, total: int) -> None:
        print(f"{suite} {stage}: {done} more of {total} episodes", flush=True)

    return evaluate(RULE, suite, found, 1, work, tell, further=random_plans(draws))
