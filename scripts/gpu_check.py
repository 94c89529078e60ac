"""Ten minutes on a GPU that tell everything: correctness, speed, memory, precision.

    python scripts/gpu_check.py
    python scripts/gpu_check.py --sections loops amp --minutes 5
    python scripts/gpu_check.py --virtual

Needs the checkout, torch, numpy, scikit-learn, pyarrow and pytest; wheels of msgspec, gymnasium and
farama-notifications that are not installed are taken from ``--wheels``. Every section runs in a
process of its own and is cut when its time is over. After every row one JSON file and one page are
rewritten, so that a run that is killed keeps what it had. A section that fails is recorded with its
traceback and the next one goes on; the exit status is then 1.

With ``--virtual`` all of it runs at tiny sizes on a virtual device, which shows that it runs.
"""

import argparse
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_checks import paths

if TYPE_CHECKING:
    from gpu_checks.results import Results
    from gpu_checks.section import Section

MARGIN = 0.97
"""Part of the time for the sections; the rest is for starting and ending processes."""
CORES = 8
"""CPU cores from which sections that time nothing run at the same time."""


def main() -> int:
    """Run the check; return 1 if a section failed and 2 if there is no device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--virtual", action="store_true", help="on a virtual device, tiny sizes")
    parser.add_argument("--sections", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--minutes", type=float, help="default: 9; unlimited with --virtual")
    parser.add_argument("--output", type=Path, help="folder of both files")
    parser.add_argument("--wheels", type=Path, default=paths.ROOT / "wheels")
    parser.add_argument("--measure", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.virtual and not torch.cuda.is_available():
        print(
            "gpu_check: this machine has no CUDA device; --virtual runs the check on a virtual one",
            file=sys.stderr,
        )
        return 2
    if arguments.measure:
        return measured_here(arguments.measure, arguments.virtual, arguments.into)
    # ``timeout`` and schedulers end a run with this signal: the process of a section ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        paths.prepare(arguments.wheels, Path(folder) / "wheels")
        return check(arguments, Path(folder))


def measured_here(name: str, virtual: bool, into: Path) -> int:
    """Measure a section in this process; return its exit status."""
    from gpu_checks.processes import measure
    from gpu_checks.sections import NAMES, SECTIONS

    return measure(SECTIONS[NAMES.index(name)], virtual, into)


def run(
    results: "Results", virtual: bool, limit: float | None, folder: Path, section: "Section"
) -> None:
    """Measure a section, or note what it lacks, and print its part of the page."""
    from gpu_checks.processes import Outcome, measured

    progress = partial(results.put, section)
    if section.missing:
        outcome = Outcome("skipped", missing=section.missing)
    else:
        outcome = measured(section, virtual, limit, folder, progress)
    results.put(section, outcome)
    print(f"{results.part(section)}\n", flush=True)
    if outcome.error is not None:
        print(outcome.error, file=sys.stderr, flush=True)


def check(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the sections; return the exit status."""
    from gpu_checks.processes import Outcome
    from gpu_checks.results import Results
    from gpu_checks.section import in_stages
    from gpu_checks.sections import NAMES, SECTIONS

    unknown = sorted(set(arguments.sections or ()) - set(NAMES))
    if unknown:
        names = ", ".join(unknown), ", ".join(NAMES)
        line = "gpu_check: --sections: {} is unknown; there are {}".format(*names)
        print(line, file=sys.stderr)
        return 2
    chosen = [part for part in SECTIONS if part.name in (arguments.sections or NAMES)]
    default = "runs/gpu_check_virtual" if arguments.virtual else "benchmarks/results"
    results = Results(arguments.output or paths.ROOT / default, arguments.virtual)
    minutes = arguments.minutes or (None if arguments.virtual else 9.0)
    together = not arguments.virtual and (os.cpu_count() or 1) >= CORES
    stages = in_stages(chosen, together)
    whole, planned = sum(stage.seconds for stage in stages), 0.0
    for stage in stages:
        planned += stage.seconds / whole
        # What earlier stages left is for this one.
        left = None if minutes is None else MARGIN * 60.0 * minutes * planned - results.seconds
        limit = None if left is None else max(1.0, left)
        for section in stage.sections:  # in this order on the page
            results.put(section, Outcome())
        with ThreadPoolExecutor(len(stage.sections)) as pool:
            list(pool.map(partial(run, results, arguments.virtual, limit, folder), stage.sections))
    print(f"{results.summary()}\n\nwritten: {results.output}.md and .json")
    return 1 if results.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
