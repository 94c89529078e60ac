"""Networks that do not grow, trained as well as their size allows: what growing has to beat.

Both functions return None for a task without tuned recipes, such as a user's own or a draw of a
family whose hosts are trained before the episode.
"""

from dataclasses import replace

from esper.kasmina.hosts.widening import widened
from esper.runtime.recipes import read_tuned
from esper.runtime.tasks import Task

GROWN = 3
"""Size of a static network, in sizes of the host; growing everything adds about two of them."""


def tuned_twin(task: Task) -> Task | None:
    """``task`` with the recipe that is best for its host if it never grows."""
    tuned = read_tuned().get(task.name)
    return None if tuned is None else tuned.host.on(task)


def static_network(task: Task, parameters: int | None = None) -> Task | None:
    """``task`` with a wider network in place of its host, trained by its own tuned recipe.

    Args:
        task: the task.
        parameters: wanted number of parameters, ``GROWN`` times those of the host if None. The
            recipe was tuned for that size.
    """
    tuned = read_tuned().get(task.name)
    host = widened(task.host, parameters or GROWN * task.host.parameter_count)
    return None if tuned is None or host is None else tuned.static.on(replace(task, host=host))
