"""``esper replay FILE``."""

from pathlib import Path

from esper.leyline.errors import UsageError
from esper.scripts.entry import wants_help
from esper.simic.training.replay import replay as replay_file

USAGE = """usage: esper replay FILE

Do an update again that met a number that is not finite. FILE lies under RUN/refused/. Exit status
0 where the same tensor is found again, 1 where it is not."""


def replay(arguments: list[str]) -> int:
    """Do an update again that met a number that is not finite."""
    if wants_help(arguments):
        print(USAGE)
        return 0
    if len(arguments) != 1:
        raise UsageError("esper replay: takes one file; write esper replay RUN/refused/FILE.pt")
    seen = replay_file(Path(arguments[0]))
    now = seen.found or "every number is finite"
    print(f"round {seen.round}: first tensor that is not finite: {seen.recorded}; now: {now}")
    return 0 if seen.found == seen.recorded else 1
