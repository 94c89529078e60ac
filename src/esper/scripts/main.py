"""The command ``esper``."""

import sys

from esper.scripts.entry import dispatch, guarded
from esper.scripts.query import query
from esper.scripts.report import report
from esper.scripts.runs import runs
from esper.scripts.tasks import tasks
from esper.scripts.train import train

COMMANDS = {"train": train, "tasks": tasks, "runs": runs, "report": report, "query": query}


def esper(arguments: list[str]) -> int:
    """``esper``."""
    return dispatch("esper", COMMANDS, arguments)


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(guarded(esper, sys.argv[1:]))


if __name__ == "__main__":
    main()
