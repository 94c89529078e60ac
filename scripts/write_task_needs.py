"""Write the memory that a host of each built-in task takes; see ``esper.leyline.memory_need``."""

import argparse
import json

from esper.leyline.memory_need import TASK_NEEDS
from esper.runtime.tasks import TASKS, find
from esper.tolaria.memory import stored_bytes


def task_needs() -> dict[str, list[int]]:
    """Bytes of a host and steps of an episode, by name of the task."""
    tasks = [find(name) for name in TASKS]
    return {task.name: [int(stored_bytes(task.host)), task.episode_length] for task in tasks}


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    TASK_NEEDS.write_text(json.dumps(task_needs(), indent=1) + "\n")


if __name__ == "__main__":
    main()
