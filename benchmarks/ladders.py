"""Figures and tables of ladders: several controllers between the controls, on several splits.

The unit of an interval is a split where there are several, because the hosts of a split share
their test images, and a host otherwise. Where several policies were trained, intervals have two
levels: another training run would give another policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from populations import Ints
from reporting import table

from esper.karn.intervals import two_levels
from esper.karn.ladder import Points, Step, points, points_text, steps, verdict
from esper.leyline.evaluation import RULES, Evaluation, Rung, best_rung

Floats = NDArray[np.float64]

VARIANTS = "policy", "blind twin", "yoked copy"


def units(values: Floats, splits: Ints) -> Floats:
    """Return the mean of each split, ``[..., S]``, or ``values [..., H]`` if there is one split."""
    seeds = np.unique(splits)
    if len(seeds) == 1:
        return values
    return np.stack([values[..., splits == seed].mean(-1) for seed in seeds], -1)


def pooled(found: Evaluation, splits: Ints, where: NDArray[np.bool_] | None = None) -> Evaluation:
    """Return an evaluation whose hosts are the units of the hosts ``where``, bool ``[H]``."""
    rows = np.ones(len(splits), dtype=bool) if where is None else where

    def column(values: list[float]) -> list[float]:
        return units(np.array(values)[rows], splits[rows]).tolist()

    rungs = [
        Rung(r.name, r.policy, column(r.utility), column(r.validation), column(r.added))
        for r in found.rungs
    ]
    count = len(rungs[0].utility)
    return Evaluation(
        found.policy,
        found.suite,
        found.training_hosts,
        [found.suite] * count,
        found.plans,
        rungs,
        [None] * count,
    )


def over_controllers(values: Floats, splits: Ints) -> Points:
    """Return the mean of ``values [K, H]``, fractions, with its interval over both, in points.

    A single controller has an interval over its hosts alone.
    """
    own = units(values, splits)
    if len(own) == 1:
        return points(own[0])
    found = two_levels(100.0 * own)
    return float(found.mean), float(found.low), float(found.high)


@dataclass(frozen=True, slots=True)
class Standing:
    """How trained policies stand among the controls; all differences are on the same hosts.

    Attributes:
        way: ``greedy`` or ``sampled``.
        utility: test utility in points, as all figures here.
        gain: test utility above never growing.
        validation_gain: the same on validation.
        added: parameters added.
        rule: name of the rule with the highest utility on these hosts.
        above_rule, above_blind, above_yoked: utility above that rule, the policy's blind twin and
            its yoked copy.
        by_controller: gain of each controller.
    """

    way: str
    utility: Points
    gain: Points
    validation_gain: Points
    added: float
    rule: str
    above_rule: Points
    above_blind: Points
    above_yoked: Points
    by_controller: list[float]


def best_rule(
    found: Evaluation,
    splits: Ints,
    where: NDArray[np.bool_] | None = None,
    names: Sequence[str] = RULES,
) -> str:
    """Return the name of the rule with the highest mean utility on the units of these hosts."""
    best = best_rung(pooled(found, splits, where).rungs, names)
    assert best is not None
    return best.name


def standing(
    way: str,
    policies: Sequence[Sequence[Rung]],
    found: Evaluation,
    splits: Ints,
    where: NDArray[np.bool_] | None = None,
) -> Standing:
    """Place K policies among the controls.

    Args:
        way: ``greedy`` or ``sampled``.
        policies: rungs of each policy with its blind twin and yoked copy.
        found: the controls, on the same hosts.
        splits: split of each host, ``[H]``.
        where: hosts that count, bool ``[H]``; all if None.
    """
    rows = np.ones(len(splits), dtype=bool) if where is None else where
    kept = splits[rows]

    def columns(variant: str, field: str) -> Floats:
        named = ([rung for rung in own if rung.name == f"{variant}, {way}"] for own in policies)
        return np.array([getattr(rung, field) for (rung,) in named])[:, rows]

    def control(rung: Rung, field: str) -> Floats:
        return np.array(getattr(rung, field))[rows]

    utility, blind, copied = (columns(variant, "utility") for variant in VARIANTS)
    never, rule = found.rungs[0], best_rule(found, splits, where)
    best = next(rung for rung in found.rungs if rung.name == rule)
    gain = utility - control(never, "utility")
    validation_gain = columns("policy", "validation") - control(never, "validation")
    return Standing(
        way=way,
        utility=over_controllers(utility, kept),
        gain=over_controllers(gain, kept),
        validation_gain=over_controllers(validation_gain, kept),
        added=float(columns("policy", "added").mean()),
        rule=rule,
        above_rule=over_controllers(utility - control(best, "utility"), kept),
        above_blind=over_controllers(utility - blind, kept),
        above_yoked=over_controllers(utility - copied, kept),
        by_controller=(100.0 * units(gain, kept).mean(1)).tolist(),
    )


def ladder_table(rows: Sequence[Step], policies: Sequence[Standing] = ()) -> str:
    """Return the controls, and policies after them, in Markdown."""
    heads = ("control", "utility, points", "above never growing", "on validation", "parameters")
    named = [(s.rung.name, s.utility, s.gain, s.validation_gain, s.added) for s in rows]
    named += [
        (f"**policy, {s.way}**", s.utility, s.gain, s.validation_gain, s.added) for s in policies
    ]
    lines = [
        (
            name,
            points_text(utility, ".1f"),
            points_text(gain, "+.1f"),
            points_text(validation, "+.1f"),
            f"{added:.0f}",
        )
        for name, utility, gain, validation, added in named
    ]
    return table(heads, lines)


def standing_text(found: Standing, controllers: int) -> str:
    """Say in a sentence or two where the policy stands."""
    seen = " and ".join(
        f"{verdict(value)} its {name} ({points_text(value, '+.1f')})"
        for name, value in (("blind twin", found.above_blind), ("yoked copy", found.above_yoked))
    )
    return (
        f"With {found.way} actions the policy is {verdict(found.above_rule)} the best rule "
        f"({found.rule}): {points_text(found.above_rule, '+.1f')} points, over {controllers} "
        f"trained policies and the hosts. It is {seen}."
    )


def control_figures(found: Evaluation, splits: Ints) -> dict[str, dict[str, object]]:
    """Return the figures of every control for a file, by name."""
    return {
        step.rung.name: {
            "utility": step.utility,
            "gain": step.gain,
            "validation_gain": step.validation_gain,
            "added": step.added,
        }
        for step in steps(pooled(found, splits))
    }
