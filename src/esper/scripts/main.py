"""The command ``esper``."""

import sys
from importlib import import_module

from esper import __version__
from esper.scripts.entry import Command, dispatch, guarded


def _later(name: str, summary: str) -> Command:
    """A command whose module is imported when it is used: torch alone takes seconds."""

    def command(arguments: list[str]) -> int:
        run: Command = getattr(import_module(f"esper.scripts.{name}"), name)
        return run(arguments)

    command.__doc__ = summary
    return command


COMMANDS = {
    name: _later(name, summary)
    for name, summary in {
        "train": "Train a policy: ppo or heuristic.",
        "grow": "Grow one network with a policy and export it.",
        "sanctum": "Watch a run on the terminal, live or finished.",
        "report": "Write what runs did into one HTML file.",
        "query": "Ask runs by SQL over views of their events.",
        "runs": "List runs with their status, or remove some (runs prune).",
        "replay": "Do an update again that met a number that is not finite.",
        "tasks": "List the tasks one can train on; `check` those of your own, or `fetch` data.",
    }.items()
}


def esper(arguments: list[str]) -> int:
    """Run one of ``COMMANDS``, or print the version."""
    if arguments[:1] == ["--version"]:
        print(f"esper {__version__}")
        return 0
    status = dispatch("esper", COMMANDS, arguments)
    if arguments[0] in ("-h", "--help"):
        print("\noptions:\n  --version   Print the version and exit.")
    return status


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(guarded(esper, sys.argv[1:]))


if __name__ == "__main__":
    main()
