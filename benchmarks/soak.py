"""How does the memory of training grow over hours?

    python benchmarks/soak.py --minutes 120 --write

One process trains until the time is over, and ends by SIGTERM. Its resident memory is read every
ten seconds. The growth is the least-squares slope after the first ``--warm-up`` minutes, in which
rounds are trained for the first time, caches fill and the allocator reaches its working size. Jumps
are the steps between two readings of more than a megabyte. The largest one is explained by a second
measurement: a fresh process moves the run's events to Parquet several times, as training does when
they reach 8 MiB. ``MALLOC_TRIM_THRESHOLD_`` is left alone, so the figure is that of a user.
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
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from reporting import made_on, new_parser, publish, table

from esper.nissa.sinks import PART_BYTES, rotate

SECONDS = 10.0
"""Seconds between two readings."""
MIB = 2**20
ROTATIONS = 5
"""Times that events are moved to Parquet in a process of their own."""
SETTINGS = {"task": "digits_shift", "envs": 16, "rounds": 1_000_000, "seed": 7, "threads": 1}


def resident(process: int) -> int:
    """Return the resident memory of a process, bytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def watch(folder: Path, minutes: float, flags: Sequence[str]) -> dict[str, Any]:
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


def rotations(events: Path, folder: Path) -> list[float]:
    """Resident memory at first and after each of some rotations of events, MiB."""
    content = events.read_bytes()
    whole = content[: content.rindex(b"\n") + 1]
    lines = whole * (PART_BYTES // len(whole) + 1)
    found = [resident(os.getpid()) / MIB]
    for _ in range(ROTATIONS):
        (folder / "events.jsonl").write_bytes(lines)
        rotate(folder, PART_BYTES)
        found.append(resident(os.getpid()) / MIB)
    return found


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
        found["written"] = sum(path.stat().st_size for path in run.glob("events*")) + sum(
            path.stat().st_size for path in run.glob("events/*")
        )
        place = Path(folder) / "rotations"
        place.mkdir()
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            found["rotations"] = fresh.submit(rotations, run / "events.jsonl", place).result()
    growth = slope(found["readings"], arguments.warm_up)
    page = soak_page(found, arguments.minutes, arguments.warm_up)
    publish("soak", "Memory of a long training", page, arguments.write, found)
    return 0 if growth < MIB else 1


def soak_page(found: dict[str, Any], minutes: float, warm_up: float) -> tuple[str, ...]:
    """The paragraphs of the result."""
    readings: list[tuple[float, int]] = found["readings"]
    growth, moved = slope(readings, warm_up), found["rotations"]
    every = max(1, len(readings) // 12)
    rows = [(f"{s / 60:.1f}", f"{size / MIB:.1f}") for s, size in readings[every - 1 :: every]]
    jumps = [
        (f"{after[0] / 60:.1f}", f"{(after[1] - before[1]) / MIB:+.1f}")
        for before, after in pairwise(readings)
        if abs(after[1] - before[1]) > MIB
    ]
    settings = shlex.join(f"{name}={value}" for name, value in SETTINGS.items())
    return (
        f"`esper train ppo` for {minutes:.0f} minutes ({settings}).",
        f"Growth after {warm_up:.0f} minutes: **{growth / MIB:+.3f} MiB per minute**. "
        f"Exit status {found['code']} {found['ended']:.1f} s after SIGTERM. Files of events: "
        f"{found['written'] / MIB:.1f} MiB.",
        table(("minute", "resident, MiB"), rows),
        "Steps of more than 1 MiB between two readings:",
        table(("minute", "MiB"), jumps) if jumps else "none.",
        "A fresh process that moves 8 MiB of such events to Parquet grows by "
        f"{moved[1] - moved[0]:.1f} MiB the first time, and by {moved[-1] - moved[1]:+.1f} MiB in "
        f"the {ROTATIONS - 1} times after it. Training does so every two minutes here: the first "
        "time explains the large step of the first minutes, and the writer's temporary memory the "
        "steps of a few MiB, up and down, at that interval.",
        f"{made_on('other work on the machine')}.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
