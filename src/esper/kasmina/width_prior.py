"""How much wider the layers of a module become: what that gains on the mean, and what it costs."""

from collections.abc import Callable, Collection, Mapping
from math import log

import numpy as np
from torch import Tensor, nn

from esper.kasmina.channel_groups import ChannelGroup
from esper.kasmina.layer_kinds import (
    layer_at,
    reading_names,
    reads_itself,
    row_count,
    rows_first,
    size_names,
)
from esper.kasmina.new_channels import channel_count, ends_of
from esper.kasmina.wider_layers import parameter_count

FACTORS = 1.5, 2.0, 4.0, 8.0
"""How many times as wide a layer may become."""
GAINS = {
    3: (0.070, 0.099, 0.185, 0.245),
    6: (0.050, 0.076, 0.121, 0.155),
    12: (0.042, 0.062, 0.091, 0.109),
    24: (0.019, 0.026, 0.038, 0.048),
    48: (0.012, 0.015, 0.020, 0.026),
}
"""By the width up to which it holds, what each of ``FACTORS`` adds to the score on test: means over
the hosts of ``benchmarks/capacity_page.py``. Wider layers stay as they are."""
NEAR = 0.005
"""Of factors whose worth differs by less, the smallest is taken."""


def planned_counts(
    model: nn.Module, groups: Collection[ChannelGroup], cost: Callable[[float], float]
) -> dict[ChannelGroup, int]:
    """How many channels each group gets: what it adds to the score, minus what it costs.

    Args:
        model: the module.
        groups: some of its groups.
        cost: of so many times the parameters, in the unit of the score; it is paid for those that
            the module gets if all groups become as many times as wide.
    """
    counts = [{group: group.new_count(f - 1.0) for group in groups} for f in FACTORS]
    size = parameter_count(model)
    costs = [cost(wider_size(model, each) / size) for each in counts]
    plan = {}
    for group in groups:
        worths = [0.0, *(gain - cost for gain, cost in zip(_gains(group), costs, strict=True))]
        choice = next(i for i, worth in enumerate(worths) if worth >= max(worths) - NEAR)
        if choice and counts[choice - 1][group]:
            plan[group] = counts[choice - 1][group]
    return plan


def expected_gain(counts: Mapping[ChannelGroup, int]) -> float:
    """What so many new channels add to the score by ``GAINS``.

    Between factors it is linear in their logarithm; of several groups it is the mean.
    """
    factors = [0.0, *map(log, FACTORS)]
    gains = [
        np.interp(log(1.0 + count / group.channels), factors, [0.0, *_gains(group)])
        for group, count in counts.items()
    ]
    return float(np.mean(gains))


def _gains(group: ChannelGroup) -> tuple[float, ...]:
    return next((row for width, row in GAINS.items() if group.width <= width), (0.0,) * 4)


def wider_size(model: nn.Module, counts: Mapping[ChannelGroup, int]) -> int:
    """Parameters of the module with so many new channels."""
    rows: dict[str, float] = {}
    columns: dict[str, float] = {}
    for group, count in (part for each, n in counts.items() for part in each.parts(n)):
        channels = channel_count(model, group)
        for name in (*group.writers, *group.companions):
            layer, tensors = layer_at(model, name)
            size = row_count(layer, [x for *_, x in tensors], group.axes.get(name))
            new = count * group.rows(name, size, channels)
            rows[name] = rows.get(name, 1.0) + new / size
        for name, block in group.readers.items():
            layer, tensors = layer_at(model, name)
            axes = group.axes.get(name)
            if axes is None:
                size = getattr(layer, size_names(layer)[1])
            else:
                size = rows_first(layer, tensors[0][2], axes=axes).shape[1]
            block *= len(ends_of(model, group, name))
            columns[name] = columns.get(name, 1.0) + count * block / size
    more = dict[Tensor, int]()
    for name in rows.keys() | columns.keys():
        layer, tensors = layer_at(model, name)
        for _, key, parameter in (each for each in tensors if isinstance(each[2], nn.Parameter)):
            factor = rows.get(name, 1.0)
            if reads_itself(layer, key):
                factor *= factor
            elif key in reading_names(layer) or not size_names(layer):
                factor *= columns.get(name, 1.0)
            more[parameter] = round(parameter.numel() * (factor - 1.0))
    return parameter_count(model) + sum(more.values())
