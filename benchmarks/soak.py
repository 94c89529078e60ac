"""How does the memory of training grow over hours?

    python benchmarks/soak.py --minutes 120 --write

One process trains until the time is over, and ends by SIGTERM. Its resident memory is read every
ten seconds. The growth is the least-squares slope after the first ``--warm-up`` minutes, in which
rounds are trained for the first time, caches fill and the allocator reaches its working size. Jumps
are the steps between two readings of more than a megabyte. ``MALLOC_TRIM_THRESHOLD_`` is left
alone, so the figure is that of a user.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from reporting import made_on, new_parser, publish, table

SECONDS = 10.0
"""Seconds between two readings."""
MIB = 2**20
SETTINGS = {"task": "digits_shift", "envs": 16, "rounds": 1_000_000, "seed": 7, "threads": 1}


def resident(process: int) -> int:
    """Return the resident memory of a process, bytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def watch(folder: Path, minutes: float, flags: Sequence[str]) -> dict[str, object]:
    """Train for some minutes; return the readings and what the run left."""
    named = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "esper.scripts.main", "train", "ppo", *named]
    command += [f"--telemetry-dir={folder}", *flags]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    begin, readings = time.monotonic(), []
    while time.monotonic() - begin < 60 * minutes:
        time.sleep(SECONDS)
        if process.poll() is not None:
            raise RuntimeError((folder / "output").read_text())
        readings.append((time.monotonic() - begin, resident(process.pid)))
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    code = process.wait()
    return {"readings": readings, "code": code, "ended": time.monotonic() - begin}


def slope(readings: Sequence[tuple[float, int]], warm_up: float) -> float:
    """Return bytes per minute after ``warm_up`` minutes."""
    late = np.array([r for r in readings if r[0] >= 60 * warm_up])
    return float(np.polyfit(late[:, 0] / 60, late[:, 1], 1)[0])


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=10.0)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="more flags of esper train ppo")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = watch(Path(folder), arguments.minutes, arguments.flags)
        run = next(path for path in Path(folder).iterdir() if path.is_dir())
        written = sum(path.stat().st_size for path in run.glob("events*")) + sum(
            path.stat().st_size for path in run.glob("events/*")
        )
    readings: list[tuple[float, int]] = found["readings"]  # type: ignore[assignment]
    growth = slope(readings, arguments.warm_up)
    every = max(1, len(readings) // 12)
    rows = [(f"{s / 60:.1f}", f"{size / MIB:.1f}") for s, size in readings[every - 1 :: every]]
    jumps = [
        (f"{after[0] / 60:.1f}", f"{(after[1] - before[1]) / MIB:+.1f}")
        for before, after in pairwise(readings)
        if abs(after[1] - before[1]) > MIB
    ]
    settings = shlex.join(f"{name}={value}" for name, value in SETTINGS.items())
    ok = growth < MIB
    parts = (
        f"`esper train ppo` for {arguments.minutes:.0f} minutes ({settings}).",
        f"Growth after {arguments.warm_up:.0f} minutes: **{growth / MIB:+.3f} MiB per minute**. "
        f"Exit status {found['code']} {found['ended']:.1f} s after SIGTERM. Files of events: "
        f"{written / MIB:.1f} MiB.",
        table(("minute", "resident, MiB"), rows),
        "Steps of more than 1 MiB between two readings:",
        table(("minute", "MiB"), jumps) if jumps else "none.",
        f"{made_on('other work on the machine')}.",
    )
    publish("soak", "Memory of a long training", parts, arguments.write, found)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
