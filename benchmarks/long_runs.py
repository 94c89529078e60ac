"""What do the events of a long run cost: on the disk, and in the memory of commands?

    python benchmarks/long_runs.py --write                   # 1 GB of lines, about half an hour
    python benchmarks/long_runs.py --gigabytes 0.1

A few rounds are trained at level ``normal``, with and without groups, and their bytes per
environment step counted. Then their events are repeated as those of later rounds until there are as
many lines as asked for, once compressed as the sink does it, and once as plain lines, as runs of
earlier versions have them. Each command runs in a process of its own; its peak resident memory is
that which the kernel reports. Memory at ten times the size is extrapolated from the sizes measured.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from reporting import kept, made_on, new_parser, publish, table

from esper.karn.queries import MEMORY_MEGABYTES
from esper.karn.store import read_events
from esper.leyline.events import EpochCompleted

ENVS, ROUNDS = 64, 6
MIB = 2**20
MAX_RESIDENT, MAX_BYTES, MAX_SECONDS = 500, 60, 10
"""Bars: MiB of resident memory, bytes per environment step, seconds from SIGTERM to the end."""
RUN = {"task": "digits_shift", "envs": ENVS, "rounds": ROUNDS, "seed": 7, "threads": 1}

COMMANDS: dict[str, tuple[str, ...]] = {
    "esper runs": ("runs", "{folder}"),
    "esper query, mean over updates": (
        "query",
        "{run}",
        "SELECT avg(value_loss), count(*) FROM updates",
    ),
    "esper query, mean over steps": (
        "query",
        "{run}",
        "SELECT task, avg(reward), count(*) FROM steps GROUP BY ALL",
    ),
    "esper query, decisions joined with steps": (
        "query",
        "{run}",
        "SELECT op, avg(log_prob), count(*) FROM decisions GROUP BY ALL",
    ),
    "esper query, every step to CSV": (
        "query",
        "{run}",
        "SELECT round, step, environment, reward, op FROM steps",
        "--format=csv",
        "--output={folder}/steps.csv",
    ),
    "esper report": ("report", "{run}", "--output={folder}/report.html"),
}
WRAPPED = """import atexit, re, runpy, sys
from pathlib import Path
status = Path("/proc/self/status")
peak = re.compile(r"VmHWM:\\s+(\\d+)")
atexit.register(lambda: sys.stderr.write("\\n" + peak.search(status.read_text())[1]))
sys.argv[0] = "esper"
runpy.run_module("esper.scripts.main", run_name="__main__", alter_sys=False)
"""
"""Runs a command, and then writes its peak resident memory, KiB, as the last line of stderr. (That
which ``wait4`` reports would include this process, from which it was forked.)"""
PARQUET = "import sys\nfrom pathlib import Path\nfrom esper.nissa.sinks import write_parquet\n"
PARQUET += "write_parquet(Path(sys.argv[1]), Path(sys.argv[1]) / 'events.parquet')"


def trained(folder: Path, **settings: object) -> Path:
    """Return the directory of a short run with these settings beside ``RUN``."""
    if not folder.exists():
        named = {**RUN, **settings, "telemetry_dir": folder}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in named.items()]
        command = [sys.executable, "-m", "esper.scripts.main", "train", "ppo", *flags]
        subprocess.run(command, check=True, capture_output=True)
    return next(path for path in folder.iterdir() if path.is_dir())


def bytes_per_step(run: Path, folder: Path) -> dict[str, float]:
    """Return bytes per environment step: of the lines, and in parts."""
    steps = sum(len(event.reward) for event in read_events(run, EpochCompleted))
    lines = (run / "events.jsonl").stat().st_size
    copy = folder / "compressed.parquet"
    subprocess.run(
        [sys.executable, "-c", PARQUET.replace("/ 'events.parquet'", "/ sys.argv[2]"), run, copy],
        check=True,
    )
    return {"lines": lines / steps, "parts": copy.stat().st_size / steps}


def enlarge(run: Path, target: Path, size: float, plain: bool) -> Path:
    """Write the events of a run again and again, as those of later rounds, to ``target``."""
    from esper.leyline.events.parts import chunks, write_part
    from esper.nissa.sinks import PART_BYTES

    target.mkdir(parents=True)
    first, *events, last = map(
        msgspec.json.decode, (run / "events.jsonl").read_bytes().splitlines()
    )
    total = int(size / (run / "events.jsonl").stat().st_size * ROUNDS)
    for name in ("config.json", "lock"):
        shutil.copy(run / name, target / name)
    config = msgspec.json.decode((run / "config.json").read_bytes())
    config["settings"]["rounds"] = total + 2
    (target / "config.json").write_bytes(msgspec.json.encode(config))

    def lines() -> Any:
        yield first | {"rounds": total}
        for base in range(0, total, ROUNDS):
            for event in events:
                more = {"update": event["update"] + base} if "update" in event else {}
                number = event["round"] + base
                yield event | {"round": number, "time": event["time"] + base} | more
        yield last | {"round": total, "time": last["time"] + total}

    encoded = (msgspec.json.encode(line) + b"\n" for line in lines())
    with (target / "events.jsonl").open("wb") as file:
        if plain:
            file.writelines(encoded)
            return target
        start = 0
        for chunk in chunks(encoded, PART_BYTES):
            write_part(target, start, chunk)
            start += sum(map(len, chunk))
    return target


def measure(code: str, arguments: Sequence[str | Path]) -> dict[str, float]:
    """Run ``WRAPPED`` code; return its peak resident memory in MiB, and its seconds."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
    told = done.stderr.decode()
    if done.returncode:
        raise RuntimeError(told)
    return {"resident": int(told.splitlines()[-1]) / 1024, "seconds": time.perf_counter() - begin}


def measure_all(run: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Measure every command on a run."""
    found = {}
    for name, words in COMMANDS.items():
        filled = [word.format(run=run, folder=folder) for word in words]
        found[name] = measure(WRAPPED, filled)
        print(name, found[name], flush=True)
    code = WRAPPED.rpartition("runpy.")[0] + PARQUET
    found["events.parquet"] = measure(code, [run])
    return found


def stop(source: Path, long: Path, folder: Path) -> dict[str, float]:
    """Resume a run whose events are those of the long one, and end it by SIGTERM."""
    run = folder / "resumed"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(source, run)
    (run / "events.jsonl").unlink()
    (run / "events.parquet").unlink(missing_ok=True)
    shutil.copytree(long / "events", run / "events")
    shutil.copy(long / "events.jsonl", run / "events.jsonl")
    (run / "events.jsonl").touch()
    command = [sys.executable, "-m", "esper.scripts.main", "train", "ppo"]
    log = folder / "resumed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--resume", run, "--rounds", "1000000"], stdout=output, stderr=output
        )
    while f"round {ROUNDS + 1}/" not in log.read_text():
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    begin = time.perf_counter()
    code = process.wait()
    return {"seconds": time.perf_counter() - begin, "code": code}


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/long_runs"))
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work, size = arguments.work, arguments.gigabytes * 1e9
    work.mkdir(parents=True, exist_ok=True)
    groups, alone = trained(work / "groups"), trained(work / "alone", group_size=1, rounds=2)
    sizes = {
        "groups of 8 (default)": kept(
            work / "groups.json", lambda: bytes_per_step(groups, work.absolute())
        ),
        "no groups": kept(work / "alone.json", lambda: bytes_per_step(alone, work.absolute())),
    }
    print(sizes, flush=True)
    found: dict[str, dict[str, Any]] = {}
    for share in (0.1, 1.0):
        for kind in ("compressed", "plain"):
            name = f"{kind}-{share}"
            folder = work / name
            long = folder / "run"
            if not long.exists():
                enlarge(groups, long, size * share, kind == "plain")
            found[name] = kept(work / f"{name}.json", partial(measure_all, long, folder))
    end = kept(
        work / "end.json", lambda: stop(groups, work / "compressed-1.0" / "run", work.absolute())
    )
    rows, ok = [], end["seconds"] < MAX_SECONDS
    for kind in ("compressed", "plain"):
        few, many = found[f"{kind}-0.1"], found[f"{kind}-1.0"]
        for name in few:
            low, high = few[name]["resident"], many[name]["resident"]
            tenfold = high + 9 / 0.9 * max(0.0, high - low)
            ok = ok and high < MAX_RESIDENT
            seconds = f"{many[name]['seconds']:.0f}"
            rows.append((f"{name}, {kind}", f"{low:.0f}", f"{high:.0f}", f"{tenfold:.0f}", seconds))
    big = f"{arguments.gigabytes:g} GB"
    heads = ("command, lines", f"MiB at 0.1 x {big}", f"MiB at {big}", "MiB at 10 x", "seconds")
    normal = [(name, f"{v['lines']:.0f}", f"{v['parts']:.0f}") for name, v in sizes.items()]
    ok = ok and all(v["parts"] < MAX_BYTES for v in sizes.values())
    parts = (
        f"`{RUN['task']}`, {ENVS} environments, level `normal`. Bytes per environment step:",
        table(("environments", "lines in `events.jsonl`", "in `events/`"), normal),
        f"Peak resident memory of a command that reads {big} of event lines, and its seconds on a "
        "busy machine. Ten times the size is extrapolated on the straight line through the two "
        "sizes that were measured. For queries that overstates: their database uses at most "
        f"{MEMORY_MEGABYTES} MB, and keeps the rest in a temporary folder.",
        table(heads, rows),
        f"From SIGTERM to the end of a run that was resumed with {big} of events: "
        f"{end['seconds']:.1f} s, exit status {end['code']}.",
        f"{made_on('other work on the machine')}.",
    )
    publish("long_runs", "Events of long runs", parts, arguments.write, [sizes, found, end])
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
