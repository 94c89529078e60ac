"""The command ``esper``."""

from functools import partial
from importlib import import_module

from esper import __version__
from esper.leyline.laboratory import part
from esper.leyline.notices import notice
from esper.scripts.entry import Command, dispatch, run_command
from esper.scripts.progress_lines import progress_lines

OF_LABORATORY = ("evaluate",)
"""Commands that the laboratory offers."""
LIVE = "sanctum"
"""The command that shows everything itself."""
TELLS = ("train", "evaluate", "play", "grow")
"""Commands whose output tells what they do; the output of others is the result alone."""

COMMANDS = {
    "train": "Train a growth policy by acting or from records, or run one that does not learn.",
    "evaluate": "Measure a policy against controls on fresh hosts.",
    "play": "Play a Gymnasium task with the policy of a run.",
    "grow": "Grow one network with a policy and export it.",
    "policies": "List the policies that come with Esper, with their cards.",
    "sanctum": "Watch a run on the terminal, live or finished.",
    "report": "Write an HTML report about one or more runs.",
    "query": "Query the events and records of runs with SQL.",
    "runs": "List runs and their status; `runs prune` removes some.",
    "replay": "Repeat a refused update to find its first non-finite tensor.",
    "tasks": "List tasks; `tasks check` checks your own, `tasks fetch` downloads data.",
}


def _run(name: str, arguments: list[str]) -> int:
    """Run a command, whose module is imported only now: importing torch takes seconds."""
    if name in OF_LABORATORY:
        command: Command = part(name, f"esper {name}")
    else:
        command = getattr(import_module(f"esper.scripts.{name}"), name)
    if name == LIVE:
        return command(arguments)
    with progress_lines(f"esper {name}", partial(print, flush=True) if name in TELLS else notice):
        return command(arguments)


def esper(arguments: list[str]) -> int:
    """Run one of ``COMMANDS``, or print the version or the script of a shell's completion."""
    if arguments[:1] == ["--version"]:
        print(f"esper {__version__}")
        return 0
    if arguments[:1] == ["--completion"]:
        return _run("completion", arguments[1:])
    status = dispatch("esper", COMMANDS, _run, arguments)
    if arguments[0] in ("-h", "--help"):
        print("\noptions:\n  --version   Print the version and exit.")
        print("  --completion SHELL")
        print("              Print the script by which bash, zsh or fish completes esper.")
    return status


def main() -> None:
    """Entry point of the installed command."""
    run_command(esper)


if __name__ == "__main__":
    main()
