"""``esper report``: one HTML file on one or more runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from esper.karn.report import write_report
from esper.leyline.errors import UsageError
from esper.scripts.entry import print_help, wants_help
from esper.scripts.flags import read_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportArguments:
    """Write what runs did into one HTML file that needs no network; several stand side by side."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run directories, live or ended."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write (also -o)."""


def report(arguments: list[str]) -> int:
    """Write what runs did into one HTML file."""
    program = "esper report"
    if wants_help(arguments):
        return print_help(ReportArguments, program)
    names, given = read_arguments(program, arguments, {"output": Path}, {"-o": "--output"})
    if not names:
        raise UsageError(f"{program}: name one or more run directories; esper runs lists them")
    target = given.get("output", ReportArguments().output)
    try:
        print(write_report([Path(name) for name in names], target))
    except OSError as error:
        raise UsageError(
            f"output: cannot write to {target} ({error.strerror}); name another file with -o"
        ) from error
    return 0
