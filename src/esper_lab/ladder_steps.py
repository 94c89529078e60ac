"""The ladder of an evaluation as numbers with intervals.

The unit of an interval is a split of the data where there are several, because the hosts of a split
share their test images, and a host otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esper.karn.intervals import interval
from esper_lab.evaluation import (
    BLIND,
    CLAIRVOYANT,
    LOOKING,
    WITHOUT_GROWING,
    Evaluation,
    Rung,
    best_rung,
)

OFTEN = 0.1
"""Share of the hosts from which on a plan counts as one that is best somewhere."""

Points = tuple[float, float, float]
"""A mean in percentage points and the ends of its 95 % interval over units."""


def units(values: ArrayLike, splits: Sequence[int | None]) -> NDArray[np.float64]:
    """Return the means of ``values [..., H]`` over the hosts of each split, ``[..., U]``.

    Hosts of which no split is known, or which all have the same, are units themselves.

    Args:
        values: one number per host.
        splits: seed of the split of each host's data, ``[H]``.
    """
    numbers = np.asarray(values, dtype=float)
    seeds = {seed for seed in splits if seed is not None}
    if len(seeds) < 2 or None in splits:
        return numbers
    split_of_host = np.array(splits)
    return np.stack([numbers[..., split_of_host == seed].mean(-1) for seed in sorted(seeds)], -1)


def points(values: ArrayLike, splits: Sequence[int | None]) -> Points:
    """Return the mean over units of ``values``, fractions per host ``[H]``, in points."""
    estimate = interval(100.0 * units(values, splits)[None])
    return float(estimate.mean[0]), float(estimate.low[0]), float(estimate.high[0])


def points_text(value: Sequence[float], form: str = "+.1f") -> str:
    """Return a mean and its interval as text; ``form`` formats each number."""
    mean, low, high = value
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def verdict(difference: Sequence[float]) -> str:
    """Say on which side of zero an interval lies."""
    _, low, high = difference
    if low > 0.0:
        return "above"
    return "below" if high < 0.0 else "neither above nor below"


@dataclass(frozen=True, slots=True)
class Step:
    """A rung in percentage points, each a mean with the ends of its 95 % interval over units.

    Attributes:
        rung: the rung.
        utility: test utility.
        gain: test utility above never growing on the same host.
        validation_gain: the same on the validation split.
        added: mean number of parameters added.
    """

    rung: Rung
    utility: Points
    gain: Points
    validation_gain: Points
    added: float


def steps(evaluation: Evaluation, where: NDArray[np.bool_] | None = None) -> list[Step]:
    """The rungs of an evaluation over all hosts, or over the hosts ``where``, bool ``[H]``."""
    rows = np.ones(len(evaluation.tasks), dtype=bool) if where is None else where
    splits = [split for split, counts in zip(evaluation.splits, rows, strict=True) if counts]
    never = evaluation.rungs[0]

    def over_units(values: ArrayLike) -> Points:
        return points(np.asarray(values)[rows], splits)

    return [
        Step(
            rung,
            over_units(rung.utility),
            over_units(np.subtract(rung.utility, never.utility)),
            over_units(np.subtract(rung.validation, never.validation)),
            float(units(np.array(rung.added)[rows], splits).mean()),
        )
        for rung in evaluation.rungs
    ]


HEADS = "utility, points", "above never", "on validation", "parameters"
"""What ``step_cells`` holds."""


def step_cells(step: Step) -> tuple[str, ...]:
    """The numbers of a rung as text, see ``HEADS``."""
    return (
        points_text(step.utility, ".1f"),
        points_text(step.gain, "+.1f"),
        f"{step.validation_gain[0]:+.1f}",
        f"{step.added:.0f}",
    )


@dataclass(frozen=True, slots=True)
class Headroom:
    """What there is to gain by knowing a host.

    Attributes:
        never: share of the hosts on which never growing is best.
        plans: number of plans that are best on at least ``OFTEN`` of the hosts.
        over_blind: clairvoyant above the best blind rule, in points, with its interval.
        over_looking: clairvoyant above the best rule that looks.
        over_training: clairvoyant above the best rung of ``WITHOUT_GROWING``, if there is one.
        best_training: name of that rung.
    """

    never: float
    plans: int
    over_blind: Points
    over_looking: Points
    over_training: Points | None = None
    best_training: str | None = None

    @property
    def lacking(self) -> list[str]:
        """What the gate asks for and is not there, in words: see ``docs/evaluation.md``."""
        conditions = {
            "never growing best on 20 to 60 % of the hosts": 0.2 <= self.never <= 0.6,
            "four plans that are best on 10 % or more": self.plans >= 4,
            "4 points above the blind rules, with a lower end of 2": self.over_blind[0] >= 4.0
            and self.over_blind[1] >= 2.0,
            "2 points above the rules that look, with a lower end of 1": self.over_looking[0] >= 2.0
            and self.over_looking[1] >= 1.0,
        }
        return [name for name, holds in conditions.items() if not holds]

    @property
    def passes(self) -> bool:
        """Whether looking is worth enough: see ``docs/evaluation.md``."""
        return not self.lacking


def headroom(evaluation: Evaluation) -> Headroom:
    """The headroom of the suite; the opponents are the best of their kind on these hosts."""
    clairvoyant = best_rung(evaluation.rungs, [CLAIRVOYANT])
    assert clairvoyant is not None
    shares = np.bincount(clairvoyant.chosen or [], minlength=len(evaluation.plans)) / len(
        evaluation.tasks
    )

    def above(names: Sequence[str]) -> Points:
        rung = best_rung(evaluation.rungs, names)
        assert rung is not None
        return points(np.subtract(clairvoyant.utility, rung.utility), evaluation.splits)

    best_training = best_rung(evaluation.rungs, WITHOUT_GROWING)
    return Headroom(
        never=float(shares[0]),
        plans=int((shares >= OFTEN).sum()),
        over_blind=above(BLIND),
        over_looking=above(LOOKING),
        over_training=None if best_training is None else above([best_training.name]),
        best_training=None if best_training is None else best_training.name,
    )


def headroom_text(evaluation: Evaluation) -> str:
    """Return the headroom of an evaluation in two or three sentences."""
    room = headroom(evaluation)
    text = (
        f"Never growing is best on {100 * room.never:.0f} % of the hosts; {room.plans} plans are "
        "best on 10 % or more. The clairvoyant is above the best blind rule by "
        f"{points_text(room.over_blind, '+.1f')} points and above the best rule that looks by "
        f"{points_text(room.over_looking, '+.1f')}. The gate is "
        + (f"not passed: it asks for {'; '.join(room.lacking)}." if room.lacking else "passed.")
    )
    if room.over_training is None:
        return text
    return (
        f"{text} Compared with the best network that does not grow ({room.best_training}), the "
        f"clairvoyant scores {points_text(room.over_training, '+.1f')} points."
    )
