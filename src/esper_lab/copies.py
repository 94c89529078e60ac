"""Tuned copies of trained hosts, each priced for what it stores, and the choice among them.

Where several tasks share one trained network it has to stay as it is, and what is tuned for one of
them has to be stored beside it (Houlsby et al., "Parameter-efficient transfer learning for NLP",
ICML 2019). A practitioner would store a copy of the whole network, of its last block, of that and
the norms, a change of low rank (LoRA), or none, whichever is best on validation: that never grows
anything.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from esper.runtime.tasks import Task
from esper.tamiyo.policy.features import utility
from esper_lab.evaluation import (
    AUTO_RGN,
    COPY_CHOICE,
    COPY_SUFFIX,
    FULL_TUNING,
    LAST_LAYER_TUNING,
    Rung,
)
from esper_lab.small_copies import CHANGES

COPIES = LAST_LAYER_TUNING, *CHANGES, FULL_TUNING
TUNINGS = *COPIES, AUTO_RGN
"""Rungs behind which the copies stand."""


def with_copies(rungs: Sequence[Rung], tasks: Sequence[Task]) -> list[Rung]:
    """The rungs with those of copies behind the tunings; the same where the hosts are not tuned.

    The choice takes for each host the copy, or none, of the highest utility on validation, so it
    trains as often as there are tunings.

    Args:
        rungs: controls with scores, the first of which never grows.
        tasks: of their hosts.
    """
    by_name = {rung.name: rung for rung in rungs}
    if not by_name.keys() >= {FULL_TUNING, LAST_LAYER_TUNING}:
        return list(rungs)
    copies = [copy_of(by_name[name], tasks) for name in COPIES if name in by_name]
    copies.append(choice_of([rungs[0], *copies]))
    for copy in copies:
        by_name.pop(copy.name, None)  # controls that ship with Esper have them
    rest = list(by_name.values())
    end = 1 + max(index for index, rung in enumerate(rest) if rung.name in TUNINGS)
    return [*rest[:end], *copies, *rest[end:]]


def _copy_size(tuning: str, task: Task) -> int:
    """How many parameters the copy of a tuning stores."""
    if tuning in CHANGES:
        return CHANGES[tuning](task.host).size
    return task.host.block_sizes[-1] if tuning == LAST_LAYER_TUNING else task.host.parameter_count


def copy_of(rung: Rung, tasks: Sequence[Task]) -> Rung:
    """A tuning, which adds nothing to its host, with the price of what a copy stores."""
    assert rung.score is not None
    parameters = np.array([_copy_size(rung.name, task) for task in tasks], dtype=float)
    sizes = np.array([task.host.parameter_count for task in tasks])
    prices = np.array([task.price for task in tasks])

    def priced(scores: list[float]) -> list[float]:
        columns = map(torch.from_numpy, (np.array(scores), parameters, sizes, prices))
        return utility(*columns).tolist()

    return msgspec.structs.replace(
        rung, name=rung.name + COPY_SUFFIX, utility=priced(rung.score),
        validation=priced(rung.validation), added=parameters.tolist(),
    )  # fmt: skip


def choice_of(rungs: Sequence[Rung]) -> Rung:
    """Of each host the rung that is best on validation."""
    best = np.array([rung.validation for rung in rungs]).argmax(0)
    rows = np.arange(len(best))

    def column(columns: list[list[float]]) -> list[float]:
        return np.array(columns)[best, rows].tolist()

    return Rung(
        name=COPY_CHOICE, policy=False, utility=column([rung.utility for rung in rungs]),
        validation=column([rung.validation for rung in rungs]),
        added=column([rung.added for rung in rungs]),
        score=column([rung.score or [] for rung in rungs]),
    )  # fmt: skip
