"""Does the memory of one process stay flat when it does the same again and again?

    python benchmarks/resident.py --write          # about twelve minutes

Training runs for ``--minutes``; ``esper grow`` grows ten models in a row in one process; ``esper
query`` is called 200 times in one process. Resident memory is read after each. The first fifth is
left out: there, caches fill and the allocator reaches its working size. Growth is the least-squares
slope over what follows, per minute or per call.
"""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from reporting import made_on, new_parser, publish, table
from soak import MIB, resident, watch

MODEL = "examples/own_cnn.py:Net"
ROOT = Path(__file__).parents[1]
MODELS, CALLS = 10, 200
MOST = {"minute of training": 1.0, "model": 2.0, "query": 0.05}
"""MiB by which resident memory may grow on average."""
QUERIES = (
    "select * from runs",
    "select * from updates",
    "select round, count(*) from decisions group by round",
    "select * from records limit 5",
)


def growths(folder: Path) -> list[int]:
    """Resident memory after each model that one process grows, bytes."""
    from esper.scripts.grow import grow

    sizes = []
    for number in range(MODELS):
        flags = ["--model", str(ROOT / MODEL), "--epochs", "6", "--seed", str(number), "--keep"]
        with contextlib.redirect_stdout(io.StringIO()):
            grow([*flags, "--out", str(folder / str(number))])
        sizes.append(resident_here())
    return sizes


def queries(run: Path) -> list[int]:
    """Resident memory after each query in one process, bytes."""
    from esper.scripts.query import query

    sizes = []
    for number in range(CALLS):
        with contextlib.redirect_stdout(io.StringIO()):
            if query([str(run), QUERIES[number % len(QUERIES)]]):
                raise RuntimeError(QUERIES[number % len(QUERIES)])
        sizes.append(resident_here())
    return sizes


def resident_here() -> int:
    """Resident memory of this process, bytes."""
    return resident(os.getpid())


def slope(sizes: list[int], unit: float = 1.0) -> float:
    """MiB per ``unit`` readings after the first fifth of them."""
    late = np.array(sizes[len(sizes) // 5 :]) / MIB
    return float(np.polyfit(np.arange(len(late)), late, 1)[0]) * unit


def in_fresh_process(work: Callable[[Path], list[int]], folder: Path) -> list[int]:
    """Call ``work`` in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, folder).result()


def main() -> int:
    """Run the benchmark; return 0 if nothing grows."""
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Small parts: the memory that moving events to a part takes once is taken within the first
        # fifth, and not in the middle of the readings.
        flags = ["--record", "--record-last", "1", "--events-megabytes", "1"]
        training = watch(folder, arguments.minutes, flags)
        (run,) = (path for path in folder.iterdir() if (path / "config.json").exists())
        (folder / "grown").mkdir()
        sizes = {
            "minute of training": [size for _, size in training["readings"]],
            "model": in_fresh_process(growths, folder / "grown"),
            "query": in_fresh_process(queries, run),
        }
    per_minute = len(sizes["minute of training"]) / arguments.minutes
    growth = {
        what: slope(values, per_minute if what == "minute of training" else 1.0)
        for what, values in sizes.items()
    }
    rows = [
        (what, len(values), f"{values[0] / MIB:.0f}", f"{values[len(values) // 5] / MIB:.0f}",
         f"{values[-1] / MIB:.0f}", f"{growth[what]:+.3f}", MOST[what])
        for what, values in sizes.items()
    ]  # fmt: skip
    heads = ("what", "readings", "first", "after a fifth", "last", "MiB per each", "allowed")
    parts = ("Resident memory, MiB.", table(heads, rows), f"{made_on()}.")
    publish("resident", "Memory of one process that works on", parts, arguments.write, sizes)
    return 0 if all(growth[what] <= MOST[what] for what in MOST) else 1


if __name__ == "__main__":
    sys.exit(main())
