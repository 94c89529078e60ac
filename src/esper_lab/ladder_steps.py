"""The ladder of an evaluation as numbers with intervals: its rungs, differences and price front.

The unit of an interval is a split of the data where there are several, because the hosts of a split
share their test images, and a host otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esper.karn.intervals import interval
from esper_lab import evaluation as names
from esper_lab.evaluation import Difference, Evaluation, PricedRung, Rung, best_rung

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
        costs: mean score, and how often training doubles that of never growing; empty where that
            is not recorded.
    """

    rung: Rung
    utility: Points
    gain: Points
    validation_gain: Points
    added: float
    costs: tuple[float, ...] = ()


def _hosts(
    evaluation: Evaluation, where: NDArray[np.bool_] | None
) -> tuple[NDArray[np.bool_], list[int | None]]:
    """Which hosts count, bool ``[H]``, all by default, and the splits of those."""
    rows = np.ones(len(evaluation.tasks), dtype=bool) if where is None else where
    return rows, [split for split, row in zip(evaluation.splits, rows, strict=True) if row]


def steps(evaluation: Evaluation, where: NDArray[np.bool_] | None = None) -> list[Step]:
    """The rungs of an evaluation over all hosts, or over the hosts ``where``, bool ``[H]``."""
    rows, splits = _hosts(evaluation, where)
    never, doublings = evaluation.rungs[0], _doublings(evaluation)

    def mean(values: ArrayLike) -> float:
        return float(units(np.asarray(values)[rows], splits).mean())

    def over_units(values: ArrayLike) -> Points:
        return points(np.asarray(values)[rows], splits)

    return [
        Step(
            rung,
            over_units(rung.utility),
            over_units(np.subtract(rung.utility, never.utility)),
            over_units(np.subtract(rung.validation, never.validation)),
            mean(rung.added),
            (100.0 * mean(rung.score or []), mean(doublings[rung.name])) if doublings else (),
        )
        for rung in evaluation.rungs
    ]


Rows = tuple[str, Sequence[str], list[list[str]]]
"""Of a ladder or its front: of which hosts, empty if all; heads; cells of each row: the prices,
empty but in the front, the rung, and one for each head."""


def ladder_rows(evaluation: Evaluation) -> list[Rows]:
    """The rungs over all hosts, by price if it was drawn, and by task if there are several."""

    def rungs(part: str, where: NDArray[np.bool_] | None = None) -> Rows:
        ladder = steps(evaluation, where)
        cells = [["", step.rung.name, *step_cells(step)] for step in ladder]
        return part, step_heads(ladder[0]), cells

    parts, by_price = [rungs("")], front(evaluation)
    if by_price:
        cells = [[price_range(row), row.rung, *front_cells(row)] for row in by_price]
        parts.append(("by price of parameters", FRONT_HEADS, cells))
    tasks = np.array(evaluation.tasks)
    several = dict.fromkeys(evaluation.tasks) if len({*evaluation.tasks}) > 1 else ()
    return [*parts, *(rungs(name, tasks == name) for name in several)]


def step_heads(step: Step) -> tuple[str, ...]:
    """What ``step_cells`` holds; 80 columns have no room for validation and costs."""
    third = "doublings" if step.costs else "on validation"
    return "utility, points", "above never", third, "parameters"


def step_cells(step: Step) -> tuple[str, ...]:
    """The numbers of a rung as text, see ``step_heads``."""
    return (
        points_text(step.utility, ".1f"),
        points_text(step.gain, "+.1f"),
        f"{step.costs[1]:.1f}" if step.costs else f"{step.validation_gain[0]:+.1f}",
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
        least: points that ``over_blind`` and ``over_looking`` must have to pass, and half of them
            as lower ends.
    """

    never: float
    plans: int
    over_blind: Points
    over_looking: Points
    over_training: Points | None = None
    best_training: str | None = None
    least: tuple[float, float] = (4.0, 2.0)

    @property
    def lacking(self) -> list[str]:
        """What the gate asks for and is not there, in words: see ``docs/evaluation.md``."""
        conditions = {
            "never growing best on 20 to 60 % of the hosts": 0.2 <= self.never <= 0.6,
            "four plans that are best on 10 % or more": self.plans >= 4,
        }
        kinds = {"the blind rules": self.over_blind, "the rules that look": self.over_looking}
        for (kind, (mean, low, _)), points_asked in zip(kinds.items(), self.least, strict=True):
            text = f"{points_asked:g} points above {kind}, with a lower end of {points_asked / 2:g}"
            conditions[text] = mean >= points_asked and low >= points_asked / 2
        return [name for name, holds in conditions.items() if not holds]

    @property
    def passes(self) -> bool:
        """Whether looking is worth enough: see ``docs/evaluation.md``."""
        return not self.lacking


def headroom(evaluation: Evaluation) -> Headroom:
    """The headroom of the suite; the opponents are the best of their kind on these hosts."""
    clairvoyant = best_rung(evaluation.rungs, [names.CLAIRVOYANT])
    assert clairvoyant is not None
    shares = np.bincount(clairvoyant.chosen or [], minlength=len(evaluation.plans)) / len(
        evaluation.tasks
    )

    def above(names: Sequence[str]) -> Points:
        rung = best_rung(evaluation.rungs, names)
        assert rung is not None
        return points(np.subtract(clairvoyant.utility, rung.utility), evaluation.splits)

    best_training = best_rung(evaluation.rungs, names.WITHOUT_GROWING)
    return Headroom(
        never=float(shares[0]), plans=int((shares >= OFTEN).sum()), over_blind=above(names.BLIND),
        over_looking=above(names.LOOKING),
        over_training=None if best_training is None else above([best_training.name]),
        best_training=None if best_training is None else best_training.name,
        least=(1.5, 0.0) if evaluation.suite == names.CAPACITY else (4.0, 2.0),
    )  # fmt: skip


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


OPPONENTS = {
    "rule": "the best rule",
    "training": "the best network that does not grow",
    "misled": "its misled twin",
    "yoked": "its yoked copy",
}
"""The opponents of a policy by the kind of their difference."""
_BEST_OF = "rule", "training"
"""Opponents that are the best of their kind on these hosts."""


def differences(evaluation: Evaluation) -> list[Difference]:
    """The paired differences of every rung of the policy from every opponent that is there."""
    rows = []
    for rung in evaluation.rungs:
        if not rung.policy:
            continue
        way = rung.name.partition(", ")[2]
        opponents: dict[str, Sequence[str]] = {
            "rule": names.RULES,
            "training": names.WITHOUT_GROWING,
            "misled": [f"misled twin, {way}"],
            "yoked": [f"yoked copy, {way}"],
        }
        for kind in OPPONENTS:
            opponent = best_rung(evaluation.rungs, opponents[kind])
            if opponent is not None:
                value = points(np.subtract(rung.utility, opponent.utility), evaluation.splits)
                rows.append(Difference(rung.name, kind, opponent.name, *value, verdict(value)))
    return rows


def differences_text(evaluation: Evaluation) -> str:
    """Say in a sentence or two for every rung of the policy where it stands."""
    rows = differences(evaluation)
    sentences = []
    for name in dict.fromkeys(one.policy for one in rows):
        way = name.partition(", ")[2]
        start = f"With {way} actions the" if way in ("greedy", "sampled") else "The"
        policy_rows = [one for one in rows if one.policy == name]
        for subject, kinds in ((f"{start} policy", _BEST_OF), ("It", ("misled", "yoked"))):
            parts = [_clause(one) for one in policy_rows if one.kind in kinds]
            if parts:
                sentences.append(f"{subject} is {', and '.join(parts)} points.")
    return " ".join(sentences)


def _clause(one: Difference) -> str:
    opponent = OPPONENTS[one.kind]
    if one.kind in _BEST_OF:
        opponent = f"{opponent} ({one.opponent})"
    return f"{one.verdict} {opponent}, by {points_text((one.mean, one.low, one.high), '+.1f')}"


def budget_text(evaluation: Evaluation) -> str:
    """Say over how many episodes rules were searched and the policy was trained."""
    if evaluation.rule_episodes is None:
        return ""
    text = f"Rules were searched over {evaluation.rule_episodes:,} episodes"
    if evaluation.policy_episodes is None:
        return f"{text}."
    episodes = f"{evaluation.policy_episodes:,}" if evaluation.policy_episodes else "none"
    return f"{text}, the policy was trained on {episodes}."


def _doublings(evaluation: Evaluation) -> dict[str, NDArray[np.float64]]:
    """How often training doubles that of never growing, ``[H]``, by rung, if it is recorded."""
    if any(rung.operations is None or rung.score is None for rung in evaluation.rungs):
        return {}
    doublings = {rung.name: np.log2(np.array(rung.operations)) for rung in evaluation.rungs}
    return {name: each - doublings[names.NEVER_GROW] for name, each in doublings.items()}


def training_text(evaluation: Evaluation, cost: str = "operations of training") -> str:
    """Say at which prices of training a policy is above all that a user could do instead."""
    rungs, prices = {rung.name: rung for rung in evaluation.rungs}, evaluation.training_prices
    values = {}
    for name, counts in _doublings(evaluation).items():
        free = np.add(rungs[name].utility, counts * np.log(2.0) * (prices or 0.0))
        values[name] = float(counts.mean()), 100.0 * float(free.mean())
    opponents = [values[name] for name in (*names.RULES, *names.WITHOUT_GROWING) if name in values]
    text = []
    for name in (rung.name for rung in evaluation.rungs if rung.policy and rung.name in values):
        doublings, utility = values[name]
        low, high = 0.0, np.inf
        for more, worth in opponents:
            difference, steps_more = utility - worth, doublings - more
            if steps_more > 0.0:
                high = min(high, difference / steps_more)
            elif difference < 0.0:
                low = max(low, difference / steps_more if steps_more else np.inf)
        end = "or more" if np.isinf(high) else f"to {high:.2f}"
        text += [
            f"Trials included, it takes {2.0**doublings:.1f} times the {cost} of never growing.",
            f"Where a doubling costs {low:.2f} {end} points, nothing that a user could do instead "
            "has a higher utility."
            if low < high
            else "At no price of a doubling is its utility the highest that a user could have.",
        ]
    return " ".join(text)


def sentences(evaluation: Evaluation) -> list[str]:
    """What there is to gain, where the policy stands and what both cost, in words."""
    parts = headroom_text, differences_text, training_text, budget_text
    return [text for text in (part(evaluation) for part in parts) if text]


FRONT_HEADS = "parameters", "accuracy, %", "utility, points"
"""What ``front_cells`` holds."""


def front(evaluation: Evaluation) -> list[PricedRung]:
    """Never growing, the best rule, the clairvoyant and the policy by thirds of the price.

    The rule is the best over all hosts. The list is empty if fewer than three prices were drawn or
    scores were not recorded.
    """
    rents = np.array(evaluation.rents)
    ends, best = (names.NEVER_GROW, names.CLAIRVOYANT), best_rung(evaluation.rungs, names.RULES)
    rungs = [each for each in evaluation.rungs if each.policy or each is best or each.name in ends]
    if any(rung.score is None for rung in rungs) or len(np.unique(rents)) < 3:
        return []
    edges = np.quantile(rents, [1 / 3, 2 / 3])
    thirds = np.searchsorted(edges, rents)
    rows = []
    for third in np.unique(thirds):
        where, splits = _hosts(evaluation, thirds == third)
        prices = float(rents[where].min()), float(rents[where].max())
        for rung in rungs:
            parameters, score, utility = (
                np.array(column)[where] for column in (rung.added, rung.score, rung.utility)
            )
            # ``points`` are hundredths, and parameters are counted.
            columns = (points(each, splits) for each in (parameters / 100.0, score, utility))
            rows.append(PricedRung(rung.name, prices, int(where.sum()), *columns))
    return rows


def price_range(row: PricedRung) -> str:
    """The prices of a row as text."""
    least, greatest = row.prices
    return f"{least:.3f} to {greatest:.3f}"


def front_cells(row: PricedRung) -> Sequence[str]:
    """The numbers of a row as text, see ``FRONT_HEADS``."""
    columns = (row.added, ".0f"), (row.score, ".1f"), (row.utility, ".1f")
    return [points_text(*column) for column in columns]
