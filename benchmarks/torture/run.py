"""Torture: what was tried, what was lost, how long it took.

    python benchmarks/torture/run.py --write                    # about an hour on two cores
    python benchmarks/torture/run.py --parts damage pickles

Parts that are done are kept under ``--work`` and not repeated. A part keeps its files if it lost
something, for a look at them.
"""

import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reporting import kept, made_on, new_parser, publish, table

from torture import (
    damage,
    disk,
    flags,
    inputs,
    kills,
    readers,
    resuming,
    seals,
    small_disk,
    wrong_values,
)
from torture.common import Part, trained


def _sanctum(work: Path) -> Part:
    return kills.sanctum(work, trained(work / "base", 2))


PARTS: dict[str, Callable[[Path], Part]] = {
    "damage": damage.damage,
    "pickles": damage.pickles,
    "seals": seals.seals,
    "full_disk": disk.full_disk,
    "small_disk": small_disk.small_disk,
    "not_writable": disk.not_writable,
    "removed": disk.removed,
    "vanished": disk.vanished,
    "clock": wrong_values.clock,
    "nan": wrong_values.not_finite,
    "nan_elsewhere": wrong_values.others_not_finite,
    "manifests": inputs.manifests,
    "forgeries": seals.forgeries,
    "event_lines": inputs.event_lines,
    "lifecycles": inputs.lifecycles,
    "sighup": partial(kills.signals, number=signal.SIGHUP, count=20),
    "sigint": partial(kills.signals, number=signal.SIGINT, count=50),
    "sigterm": partial(kills.signals, number=signal.SIGTERM, count=50),
    "sigkill": kills.sigkills,
    "resuming": resuming.resuming,
    "sanctum": _sanctum,
    "readers": readers.beside,
    "readers_elsewhere": readers.beside_others,
    "configurations": inputs.configurations,
    "odd_flags": flags.odd_flags,
}


def run_part(name: str, work: Path) -> Part:
    """Run one part in a folder of its own."""
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    part = PARTS[name](folder)
    if not part.lost:
        shutil.rmtree(folder, ignore_errors=True)
    return part


def main() -> int:
    """Run the parts; return 0 if nothing was lost."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/torture"))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    found = []
    for name in arguments.parts:
        one = Part(**kept(work / f"{name}.json", partial(run_part, name, work)))
        found.append(one)
        lost = f"LOST {len(one.lost)}" if one.lost else "nothing lost"
        print(f"{name}: {one.tried} tried, {lost}, {one.seconds:.0f} s  {one.notes}", flush=True)
        for line in one.lost[:5]:
            print(f"    {line}", flush=True)
    rows = [
        (
            one.what,
            f"{one.tried:,}",
            len(one.lost) or "nothing",
            f"{one.seconds / 60:.1f}",
            one.notes,
        )
        for one in found
    ]
    total = sum(one.seconds for one in found) / 60
    parts = (
        "Runs of the smallest size with an update; a run survives if its result has the bits of "
        "an undisturbed run, or if it is refused in one line that names what is wrong. Readers "
        "survive if no exception leaves them.",
        table(("what", "tried", "lost", "minutes", "notes"), rows),
        f"{total:.0f} minutes in all.",
        f"{made_on('other work on the machine')}.",
    )
    publish("torture", "Torture", parts, arguments.write)
    return 1 if any(one.lost for one in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
