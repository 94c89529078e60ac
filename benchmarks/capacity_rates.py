"""Networks of the suite ``capacity`` at several learning rates, see ``capacity_ladder.py``."""

from typing import Any

from capacity_page import best_result
from capacity_plays import RATES, train
from capacity_rules import Outcomes

from esper_lab.capacity.hosts import Host
from esper_lab.capacity.training import FACTORS, Entry, arrival, grown


def further_statics(host: Host) -> list[list[dict[str, Any]]]:
    """The static networks of each of ``FACTORS``, at each of ``RATES``."""
    data, _ = arrival(host)
    return [
        [
            train(host.build(data, factor, 1), host, data, host.epochs, rate=rate)
            for factor in FACTORS
        ]
        for rate in RATES
    ]


def further_growth(policy: str, host: Host) -> list[Entry]:
    """What ``esper.grow`` makes of a host at each of ``RATES``."""
    return [grown(policy, host, rate) for rate in RATES]


def tuned(
    host: Outcomes, statics: list[list[dict[str, Any]]], nevers: list[dict[str, Any]]
) -> Outcomes:
    """The outcomes of a host whose static networks each have the rate that is best on validation.

    Args:
        host: see ``capacity_ladder.all_controls``.
        statics: see ``further_statics``.
        nevers: ``further_growth`` of never growing.
    """
    columns = zip(host["statics"], *statics, strict=True)
    never = best_result(host, [host["never"], *nevers])
    return host | {"statics": [best_result(host, [*each]) for each in columns], "never": never}
