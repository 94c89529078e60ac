"""What does esper evaluate print? Its output for the heuristic, for the page on evaluation.

    python benchmarks/example_ladder.py --write

Runs ``esper evaluate --policy heuristic`` in an empty folder, with the controls that ship with
Esper if they are those of this version.
"""

import contextlib
import io
import os
import tempfile
import textwrap

from reporting import made_on, new_parser, publish

from esper_lab.evaluate import evaluate

COMMAND = ("--policy", "heuristic")
WIDTH = 105
"""Columns of the output; sentences are wrapped to it."""


def output(arguments: list[str]) -> str:
    """Return what ``esper evaluate`` prints, in an empty folder."""
    printed = io.StringIO()
    os.environ["COLUMNS"] = str(WIDTH)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
    ):
        evaluate(arguments)
    return printed.getvalue()


def wrapped(text: str) -> str:
    """Return the text with its sentences wrapped and without blanks at the ends of lines."""
    lines = [
        part
        for line in text.splitlines()
        for part in (textwrap.wrap(line, WIDTH, break_on_hyphens=False) if line else [""])
    ]
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    """Run the benchmark; return its exit status."""
    arguments = new_parser(__doc__).parse_args()
    command = " ".join(("esper evaluate", *COMMAND))
    parts = [
        f"`{command}`:",
        f"```\n{wrapped(output(list(COMMAND)).strip())}\n```",
        f"{made_on()}.",
    ]
    publish("example_ladder", "What esper evaluate prints", parts, arguments.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
