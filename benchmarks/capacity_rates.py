"""Networks of the suite ``capacity`` at several learning rates, see ``capacity_ladder.py``."""

from collections.abc import Sequence
from typing import Any

from capacity_page import best_result
from capacity_plays import RATES, STATICS, WIDENINGS, Plan, play_plan
from capacity_rules import Outcomes, gains_by_width
from reporting import table

from esper_lab.capacity.hosts import Host
from esper_lab.capacity.training import FACTORS, Entry, arrival, grown

Columns = list[list[dict[str, Any]]]
"""Results of plans at each rate."""
LESSON_RATES = RATES[1:]
"""Further rates at which rules learn what wider layers gain."""
GAINED = """\
Points of score on test above the network that does not grow, on the mean of the hosts on which
rules are learned: at a rate of 0.005, as the table of `widen` was, and where each network has the
best of 0.005, 0.015 and 0.04 on validation. At one rate, small networks have not learned enough, so
the table expects too much of layers of 4 channels and more."""


def further_plans(host: Host, plans: Sequence[Plan], rates: Sequence[float]) -> Columns:
    """Plans of a host at each of some rates, in the first order of its data."""
    data, small = arrival(host)
    return [[play_plan(host, data, small, plan, 1, rate=rate) for plan in plans] for rate in rates]


def further_statics(host: Host) -> Columns:
    """The static networks of each size, at each of ``RATES``."""
    return further_plans(host, STATICS, RATES)


def further_lessons(host: Host) -> Columns:
    """The widenings of a host at each of ``LESSON_RATES``."""
    return further_plans(host, WIDENINGS, LESSON_RATES)


def further_growth(policy: str, host: Host) -> list[Entry]:
    """What ``esper.grow`` makes of a host at each of ``RATES``."""
    return [grown(policy, host, rate) for rate in RATES]


def tuned_lesson(host: Outcomes, further: Columns) -> Outcomes:
    """The outcomes of a host each of whose plans has the rate that is best on validation."""
    columns = zip(host["plans"][0], *further, strict=True)
    return host | {"plans": [[best_result(host, [*each]) for each in columns]]}


def tuned(host: Outcomes, statics: Columns, nevers: list[dict[str, Any]]) -> Outcomes:
    """The outcomes of a host whose static networks each have the rate that is best on validation.

    Args:
        host: see ``capacity_ladder.all_controls``.
        statics: see ``further_statics``.
        nevers: ``further_growth`` of never growing.
    """
    columns = zip(host["statics"], *statics, strict=True)
    never = best_result(host, [host["never"], *nevers])
    return host | {"statics": [best_result(host, [*each]) for each in columns], "never": never}


def gain_parts(lessons: list[Outcomes], further: Sequence[Columns]) -> list[str]:
    """What wider layers gain where rules learn it, at one rate and where each has its best."""
    at_best = [tuned_lesson(*each) for each in zip(lessons, further, strict=True)]
    one, best = gains_by_width(lessons), gains_by_width(at_best)
    rows = [
        (f"to {width}", *(f"{100 * a:+.1f}, {100 * b:+.1f}" for a, b in zip(*pair, strict=True)))
        for width, pair in ((width, (one[width], best[width])) for width in one)
    ]
    heads = "width", *(f"{factor:g} times as wide" for factor in FACTORS[1:])
    return ["## What wider layers gain", GAINED, table(heads, rows)]
