"""Pages of results: arguments, timings, tables in Markdown, and the machine they were made on."""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esper.simic.run.run_directory import processor_name

RESULTS = Path(__file__).parent / "results"


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--write``, described by the first line of ``doc``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    return parser


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the JSON in ``path`` if the file exists; else call ``make`` and write its result."""
    if not path.exists():
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.part")
        partial.write_text(json.dumps(found, default=vars))
        partial.replace(path)
    return json.loads(path.read_text())


def in_turns(
    calls: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, tuple[float, float]]:
    """Return the median wall and CPU seconds of each call.

    The calls take turns, so that drift of the machine's speed affects all of them. The first two
    turns are not counted.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: (
            statistics.median(w for w, _ in pairs[2:]),
            statistics.median(c for _, c in pairs[2:]),
        )
        for name, pairs in found.items()
    }


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows))
    return "\n".join([first, "|" + "---|" * len(heads), *others])


def made_on(*more: str) -> str:
    """Return torch version, processor, ``more`` and today's date, separated by commas."""
    processor = f"{os.cpu_count()} x {processor_name()}"
    return ", ".join([f"torch {torch.__version__}", processor, *more, time.strftime("%Y-%m-%d")])


def publish(
    name: str, title: str, parts: Iterable[str], write: bool, figures: object = None
) -> None:
    """Print a page: its title, the command as typed, and ``parts``.

    Args:
        name: name of the files in ``results/``, without suffix.
        title: title of the page.
        parts: paragraphs and tables.
        write: whether to write the page, and ``figures`` beside it as JSON where there are any.
        figures: data behind the tables.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    command = f"{f'OMP_NUM_THREADS={threads} ' if threads else ''}python {shlex.join(sys.argv)}"
    page = "\n\n".join([f"# {title}", f"`{command}`", *parts]) + "\n"
    print(page)
    if write:
        (RESULTS / f"{name}.md").write_text(page)
        if figures is not None:
            text = json.dumps(figures, indent=2, default=vars)
            (RESULTS / f"{name}.json").write_text(text + "\n")
