"""Networks that do not grow, trained as well as their size allows: what growing has to beat.

The recipes of built-in tasks were tuned beforehand. A draw of a family keeps the rate and decay
that were drawn, and the ladder tunes a factor of the rate on training hosts. Both functions return
None for tasks with trained hosts and for those of users.
"""

from dataclasses import replace

from esper.runtime.tasks import FAMILIES, Task
from esper_lab.recipes import read_tuned
from esper_lab.widening import widened

GROWN = 3
"""Size of a static network, in sizes of the host; growing everything adds about two of them."""


def tuned_twin(task: Task) -> Task | None:
    """``task`` with the recipe that is best for its host if it never grows."""
    tuned = read_tuned().get(task.name)
    if tuned is not None:
        return tuned.host.on(task)
    return task if _drawn_from_scratch(task) else None


def static_network(task: Task) -> Task | None:
    """``task`` with a network ``GROWN`` times as large as its host, trained by its own recipe."""
    tuned = read_tuned().get(task.name)
    if tuned is None and not _drawn_from_scratch(task):
        return None
    host = widened(task.host, GROWN * task.host.parameter_count)
    if host is None:
        return None
    wider = replace(task, host=host)
    return wider if tuned is None else tuned.static.on(wider)


def _drawn_from_scratch(task: Task) -> bool:
    return task.family in FAMILIES and task.pretraining is None
