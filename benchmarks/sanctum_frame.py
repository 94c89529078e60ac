"""How long does Sanctum take to open a long run, and to draw a frame of it?

    python benchmarks/sanctum_frame.py --write

The run has 10^6 environment steps of 64 environments at level normal (15,625 steps): one round is
trained, and its events are repeated as those of 125 rounds. Opening is timed from the start of the
process until the status line on a pseudo-terminal says ``finished``. Frames are drawn in this
process, at moments spread over a replay; a frame is timed from the request for its moment to the
characters of the whole screen. Processor time is reported too, because the machine may be busy.
"""

import asyncio
import fcntl
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from statistics import median

import msgspec
from reporting import made_on, new_parser, publish, table

from esper.karn.sanctum.app import PAGES, Sanctum
from esper.leyline.config import unflatten
from esper.simic.training.vectorized import run_training

ENVS, LENGTH, ROUNDS = 64, 125, 125
STEPS = LENGTH * ROUNDS
SIZES = ((80, 24), (160, 50))
FRAMES = 30


def write_run(folder: Path) -> Path:
    """Write a run of one round whose events are repeated ``ROUNDS`` times; return its directory."""
    settings = {"envs": ENVS, "episode_length": LENGTH, "rounds": 1, "telemetry_dir": str(folder)}
    run = run_training(unflatten(settings), "ppo").path
    file = run / "events.jsonl"
    first, *events, last = map(msgspec.json.decode, file.read_bytes().splitlines())
    seconds = last["time"] - first["time"]
    with file.open("wb") as lines:

        def write(event: dict[str, object]) -> None:
            lines.write(msgspec.json.encode(event) + b"\n")

        write(first | {"rounds": ROUNDS})
        for number in range(1, ROUNDS + 1):
            for event in events:
                write(event | {"round": number, "time": event["time"] + number * seconds})
        write(last | {"round": ROUNDS, "time": last["time"] + ROUNDS * seconds})
    return run


def opening(run: Path, size: tuple[int, int]) -> tuple[float, float]:
    """Return wall and processor seconds from the start of Sanctum until the whole run is shown."""
    begin = time.perf_counter()
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm-256color"
        command = [sys.executable, "-m", "esper.scripts.main", "sanctum", str(run)]
        os.execv(sys.executable, command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    shown = b""
    while "■ finished".encode() not in shown:
        if not select.select([terminal], [], [], 60.0)[0]:
            raise TimeoutError("Sanctum did not open")
        shown += os.read(terminal, 65536)
    seconds = time.perf_counter() - begin
    os.write(terminal, b"q")
    while True:
        try:
            os.read(terminal, 65536)
        except OSError:
            break
    usage = os.wait4(process, 0)[2]
    return seconds, usage.ru_utime + usage.ru_stime


async def frames(run: Path, size: tuple[int, int]) -> dict[str, list[tuple[float, float]]]:
    """Return the wall and processor seconds of frames, by page."""
    app = Sanctum(run)
    found: dict[str, list[tuple[float, float]]] = {}
    async with app.run_test(size=size) as pilot:
        while not app.at_end:
            await pilot.pause(0.05)
        for page in PAGES:
            app.action_page(page.title)
            await pilot.pause(0.3)
            found[page.title] = []
            for i in range(FRAMES):
                app.playhead.index = (i + 1) * STEPS // (FRAMES + 1)
                wall, processor = time.perf_counter(), time.process_time()
                app.draw()
                app.screen._compositor.render_strips()
                found[page.title].append(
                    (time.perf_counter() - wall, time.process_time() - processor)
                )
                await pilot.pause(0.1)
    return found


def main() -> int:
    """Run the benchmark; return its exit status."""
    arguments = new_parser(__doc__).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder))
        megabytes = (run / "events.jsonl").stat().st_size / 2**20
        parts = [f"The event file has {megabytes:.0f} MiB."]
        for columns, lines in SIZES:
            took = [opening(run, (columns, lines)) for _ in range(3)]
            wall, processor = (median(part) for part in zip(*took, strict=True))
            seconds = f"{wall:.2f} s ({processor:.2f} s of processor time)"
            parts.append(f"Opening at {columns}x{lines}: {seconds}, median of 3.")
        for columns, lines in SIZES:
            for page, took in asyncio.run(frames(run, (columns, lines))).items():
                wall, processor = (
                    sorted(1e3 * s for s in part) for part in zip(*took, strict=True)
                )
                figures = (median(wall), wall[int(0.95 * len(wall))], median(processor))
                rows.append((page, f"{columns}x{lines}", *(f"{ms:.0f} ms" for ms in figures)))
    parts.append(table(("page", "terminal", "median", "95 %", "processor, median"), rows))
    parts.append(f"{made_on()}.")
    title = "Sanctum on a run of a million environment steps"
    publish("sanctum", title, parts, arguments.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
