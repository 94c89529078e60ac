"""The command ``esper``."""

import sys

from rich.console import Console
from rich.table import Table

from esper.leyline.errors import UsageError
from esper.runtime.tasks import TASKS
from esper.scripts.entry import dispatch, guarded
from esper.scripts.train import train


def tasks(arguments: list[str]) -> int:
    """List the tasks one can train on."""
    if arguments:
        raise UsageError(f"esper tasks: takes no arguments, got {' '.join(arguments)}")
    table = Table("task", "what it is", "host parameters", "slots")
    for factory in TASKS.values():
        task = factory()
        slots = " ".join(slot.name for slot in task.host.slots)
        table.add_row(task.name, task.summary, str(task.host.parameter_count), slots)
    Console().print(table)
    return 0


COMMANDS = {"train": train, "tasks": tasks}


def esper(arguments: list[str]) -> int:
    """``esper``."""
    return dispatch("esper", COMMANDS, arguments)


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(guarded(esper, sys.argv[1:]))


if __name__ == "__main__":
    main()
