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

from esper.runtime.tasks import Task
from esper_lab import evaluation as names
from esper_lab.baselines import after_price
from esper_lab.evaluation import Rung
from esper_lab.small_copies import CHANGES

COPIES = names.LAST_LAYER_TUNING, *CHANGES, names.FULL_TUNING
TUNINGS = *COPIES, names.AUTO_RGN
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
    if not by_name.keys() >= {names.FULL_TUNING, names.LAST_LAYER_TUNING}:
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
    last = tuning == names.LAST_LAYER_TUNING
    return task.host.block_sizes[-1] if last else task.host.parameter_count


def copy_of(rung: Rung, tasks: Sequence[Task]) -> Rung:
    """A tuning, which adds nothing to its host, with the price of what a copy stores."""
    assert rung.score is not None
    parameters = np.array([[_copy_size(rung.name, task)] for task in tasks], dtype=float)
    utility, validation = (
        after_price(np.array(scores)[:, None], parameters, tasks)[:, 0].tolist()
        for scores in (rung.score, rung.validation)
    )
    return msgspec.structs.replace(
        rung, name=rung.name + names.COPY_SUFFIX, utility=utility, validation=validation,
        added=parameters[:, 0].tolist(),
    )  # fmt: skip


def choice_of(rungs: Sequence[Rung]) -> Rung:
    """Of each host the rung that is best on validation."""
    best = np.array([rung.validation for rung in rungs]).argmax(0)

    columns = {
        name: np.array([getattr(rung, name) for rung in rungs])[best, range(len(best))].tolist()
        for name in ("utility", "validation", "added", "score")
    }
    return Rung(names.COPY_CHOICE, policy=False, **columns)
