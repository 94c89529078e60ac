"""The controls on hosts of several splits of their data, played with a line per finished batch."""

from collections.abc import Sequence
from pathlib import Path

from esper_lab.evaluation import Evaluation
from esper_lab.hosts import hosts_by_horizon
from esper_lab.ladder import RULE, evaluate
from esper_lab.play import Hosts

SPLITS = 8
"""Default number of splits."""


def parts(
    training: str, fresh: str, counts: tuple[int, int], splits: int, threads: int
) -> list[Hosts]:
    """Return the hosts of an evaluation on ``splits`` splits, see ``hosts_by_horizon``."""
    return hosts_by_horizon(training, fresh, counts, range(splits), threads)


def controls(suite: str, found: Sequence[Hosts], random_plans: int, work: Path) -> Evaluation:
    """Play the controls on all parts; finished stages in ``work`` are not repeated."""

    def tell(stage: str, done: int, total: int) -> None:
        print(f"{suite} {stage}: {done} more of {total} episodes", flush=True)

    return evaluate(RULE, suite, found, random_plans, 1, work, tell)
