"""What shifts in a draw of ``adaptation`` or ``one_seed``: the kinds by which results are split."""

from esper.runtime.task import Task
from esper_lab.data import IMAGE_KINDS, LABEL_KINDS

SEVERAL = "two levels"
KINDS = ("nothing", "labels", "images", "channels of block 0", "channels of block 1", SEVERAL)


def what_shifts(task: Task) -> str:
    """One of ``KINDS``."""
    if task.drift is None:
        return "nothing"
    found = [
        name
        for name, kinds in (("labels", LABEL_KINDS), ("images", IMAGE_KINDS))
        if any(kind in task.summary for kind in kinds)
    ]
    if task.drift.channels is not None:
        found.append(f"channels of block {task.drift.channels.block}")
    return found[0] if len(found) == 1 else SEVERAL
