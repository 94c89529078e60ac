"""Figures and tables of ladders: several controllers between the controls.

Where several policies were trained, intervals have two levels, policies and the units of
``esper_lab.ladder_steps``: another training run would give another policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from policy_intervals import two_levels
from reporting import table

from esper_lab.evaluation import RULES, WITHOUT_GROWING, Evaluation, Rung
from esper_lab.ladder_steps import Points, Step, points, points_text, steps, units, verdict

Floats = NDArray[np.float64]
Splits = Sequence[int | None]

VARIANTS = "policy", "misled twin", "yoked copy"


def over_controllers(values: Floats, splits: Splits) -> Points:
    """Return the mean of ``values [K, H]``, fractions, with its interval over both, in points.

    A single controller has an interval over the units of its hosts alone.
    """
    own = units(values, splits)
    if len(own) == 1:
        return points(values[0], splits)
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
        above_rule, above_misled, above_yoked: utility above that rule, the policy's misled twin and
            its yoked copy.
        network: name of the network that does not grow with the highest utility on these hosts,
            None if there is none.
        above_network: utility above that network.
        by_controller: gain of each controller.
    """

    way: str
    utility: Points
    gain: Points
    validation_gain: Points
    added: float
    rule: str
    above_rule: Points
    above_misled: Points
    above_yoked: Points
    network: str | None
    above_network: Points | None
    by_controller: list[float]


def best_of(
    found: Evaluation, names: Sequence[str], where: NDArray[np.bool_] | None = None
) -> Rung | None:
    """Return the rung with the highest mean utility on these hosts; None if none has the name."""
    named = (step for step in steps(found, where) if step.rung.name in names)
    best = max(named, key=lambda step: step.utility[0], default=None)
    return None if best is None else best.rung


def best_rule(found: Evaluation, where: NDArray[np.bool_] | None = None) -> Rung:
    """Return the rule with the highest mean utility on these hosts."""
    best = best_of(found, RULES, where)
    assert best is not None
    return best


def standing(
    way: str,
    policies: Sequence[Sequence[Rung]],
    found: Evaluation,
    where: NDArray[np.bool_] | None = None,
) -> Standing:
    """Place K policies among the controls.

    Args:
        way: ``greedy`` or ``sampled``.
        policies: rungs of each policy with its misled twin and yoked copy.
        found: the controls, on the same hosts.
        where: hosts that count, bool ``[H]``; all if None.
    """
    rows = np.ones(len(found.tasks), dtype=bool) if where is None else where
    kept = [split for split, counts in zip(found.splits, rows, strict=True) if counts]

    def columns(variant: str, field: str) -> Floats:
        named = ([rung for rung in own if rung.name == f"{variant}, {way}"] for own in policies)
        return np.array([getattr(rung, field) for (rung,) in named])[:, rows]

    def control(rung: Rung, field: str) -> Floats:
        return np.array(getattr(rung, field))[rows]

    utility, misled, copied = (columns(variant, "utility") for variant in VARIANTS)
    never, rule = found.rungs[0], best_rule(found, where)
    network = best_of(found, WITHOUT_GROWING, where)
    gain = utility - control(never, "utility")
    validation_gain = columns("policy", "validation") - control(never, "validation")
    return Standing(
        way=way,
        utility=over_controllers(utility, kept),
        gain=over_controllers(gain, kept),
        validation_gain=over_controllers(validation_gain, kept),
        added=float(columns("policy", "added").mean()),
        rule=rule.name,
        above_rule=over_controllers(utility - control(rule, "utility"), kept),
        above_misled=over_controllers(utility - misled, kept),
        above_yoked=over_controllers(utility - copied, kept),
        network=None if network is None else network.name,
        above_network=None
        if network is None
        else over_controllers(utility - control(network, "utility"), kept),
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
        for name, value in (("misled twin", found.above_misled), ("yoked copy", found.above_yoked))
    )
    text = (
        f"With {found.way} actions the policy is {verdict(found.above_rule)} the best rule "
        f"({found.rule}): {points_text(found.above_rule, '+.1f')} points, over {controllers} "
        f"trained policies and the hosts. It is {seen}."
    )
    if found.above_network is None:
        return text
    return (
        f"{text} It is {verdict(found.above_network)} the best network that does not grow "
        f"({found.network}): {points_text(found.above_network, '+.1f')}."
    )


def control_figures(found: Evaluation) -> dict[str, dict[str, object]]:
    """Return the figures of every control for a file, by name."""
    return {
        step.rung.name: {
            "utility": step.utility,
            "gain": step.gain,
            "validation_gain": step.validation_gain,
            "added": step.added,
        }
        for step in steps(found)
    }
