"""What does a run with actors on ray lose when processes of it are killed?

    OMP_NUM_THREADS=1 python benchmarks/ray_faults.py --write      # about 15 minutes on two cores

Trains a small growth policy with two actors and a lag of 0, whose result must be that of one
process to the last bit, and kills with SIGKILL: actors during the run, the learner, and the head
node of a cluster that the run has joined. Also names a head node that does not exist, and one that
accepts connections but never answers. Every run is compared with an undisturbed one: weights,
optimizer and normalisers in the checkpoint, and every event. What is finished is kept under
``--work`` and not repeated.
"""

import json
import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reporting import kept, made_on, new_parser, publish, table

from esper.simic.distributed.cluster import HEAD_SECONDS, START_SECONDS
from esper.simic.run.checkpoint import load_latest

RUN = {
    "task": "digits_shift",
    "envs": 8,
    "group_size": 4,
    "episode_length": 12,
    "seed": 7,
    "threads": 1,
    "lag": 0,
}
LIMIT = 900.0
"""Seconds after which something is called hung."""


@dataclass
class Training:
    """``esper train impala`` in a process of its own.

    Attributes:
        process: the process.
        log: file with its output.
        begin: when it started.
    """

    process: subprocess.Popen[bytes]
    log: Path
    begin: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, folder: Path, *flags: str) -> "Training":
        """Start a run with the given flags, whose output goes to a file in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"output{len(list(folder.glob('output*')))}"
        command = [sys.executable, "-m", "esper.scripts.train", "impala", *flags]
        with log.open("wb") as output:
            return cls(subprocess.Popen(command, stdout=output, stderr=output), log)

    @property
    def lines(self) -> list[str]:
        """What it has printed."""
        return self.log.read_text().splitlines()

    def rounds(self) -> int:
        """Number of rounds that it has reported."""
        return sum(line.startswith("round ") for line in self.lines)

    def about(self, words: str) -> list[str]:
        """The printed lines that contain ``words``."""
        return [line for line in self.lines if words in line]

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        return self.process.wait(LIMIT)


def until(true: Callable[[], bool], what: str) -> float:
    """Wait for something to become true; return the seconds that took."""
    begin = time.monotonic()
    while not true():
        if time.monotonic() - begin > LIMIT:
            raise TimeoutError(what)
        time.sleep(0.02)
    return time.monotonic() - begin


def flags(folder: Path, rounds: int, **more: Any) -> list[str]:
    """Return the flags of a new run of ``RUN`` in ``folder``."""
    settings = {**RUN, "rounds": rounds, "telemetry_dir": folder, **more}
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def actors_of(ancestor: int) -> list[int]:
    """Return the process numbers of the actors among the descendants of a process."""
    parents, actors = {}, []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            name = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        parents[int(entry.name)] = int(status[1])
        if name.startswith(b"ray::ShardProcess") and status[0] != "Z":
            actors.append(int(entry.name))

    def descends(process: int) -> bool:
        while process > 1 and process != ancestor:
            process = parents.get(process, 0)
        return process == ancestor

    return [actor for actor in actors if descends(actor)]


def run_of(folder: Path) -> Path:
    """Return the run directory in ``folder``."""
    (path,) = (path for path in folder.iterdir() if path.is_dir())
    return path


def same_result(mine: Path, theirs: Path) -> bool:
    """Whether two runs have the same checkpoint and have told the same, except for times."""
    one, other = (list(_flat(load_latest(path).parts)) for path in (mine, theirs))
    same = [name for name, _ in one] == [name for name, _ in other]
    weights = same and all(torch.equal(x[1], y[1]) for x, y in zip(one, other, strict=True))
    return weights and _told(mine) == _told(theirs)


def _flat(parts: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(parts, dict):
        for key, value in parts.items():
            yield from _flat(value, f"{name}/{key}")
    else:
        yield name, parts


def _told(run: Path) -> list[Any]:
    """Return what a run told of its steps, decisions, outcomes and updates."""
    wanted = ("EPOCH_COMPLETED", "DECISIONS_MADE", "EPISODE_OUTCOME", "PPO_UPDATE_COMPLETED")
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    kept = [event for event in events if event["event_type"] in wanted]
    return [{k: v for k, v in event.items() if k != "time"} for event in kept]


@contextmanager
def head() -> Iterator[tuple[str, list[int]]]:
    """Within the context, run the head node of a cluster; yields its address and processes."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"]
    more = ["--num-cpus=2", "--include-dashboard=false", f"--temp-dir={folder}"]
    more += ["--object-store-memory=200000000", "--disable-usage-stats"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    try:
        yield f"127.0.0.1:{port}", _ray_processes(folder)
    finally:
        for process in _ray_processes(folder):
            _kill(process)
        shutil.rmtree(folder, ignore_errors=True)


def _ray_processes(folder: Path) -> list[int]:
    """Return the processes of the cluster whose files are in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.fsencode(folder) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended
    return [process for process in found if process != os.getpid()]


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# --- the faults -------------------------------------------------------------------------------


def alone(folder: Path, rounds: int) -> str:
    """Return the run directory of an undisturbed run of one process."""
    shutil.rmtree(folder, ignore_errors=True)
    training = Training.start(folder, *flags(folder, rounds))
    if training.wait() != 0:
        raise RuntimeError("\n".join(training.lines))
    return str(run_of(folder))


def kill_actors(folder: Path, rounds: int, kills: int, expected: Path) -> dict[str, Any]:
    """Kill an actor again and again, each time once the last one is at work again."""
    training = Training.start(folder, *flags(folder, rounds, actors=2))
    draws, seconds = random.Random(0), []
    until(partial(_reported, training, 1), "first round")
    for kill in range(kills):
        until(lambda: len(actors_of(training.process.pid)) == 2, "two actors")
        time.sleep(draws.random())
        victim = draws.choice(actors_of(training.process.pid))
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        until(partial(_told_of, training, kill + 1), f"line {kill + 1}")
        seconds.append(time.monotonic() - begin)
        print(f"kill {kill + 1}: {seconds[-1]:.1f} s, round {training.rounds()}", flush=True)
    code = training.wait()
    return {
        "fault": f"{kills} SIGKILLs of actors in one run of {rounds} rounds",
        "code": code,
        "lines": len(training.about("was lost")),
        "seconds": statistics.median(seconds),
        "most_seconds": max(seconds),
        "same": same_result(run_of(folder), expected),
    }


def _told_of(training: Training, deaths: int) -> bool:
    _check_runs(training)
    return len(training.about("was lost")) >= deaths


def _reported(training: Training, rounds: int) -> bool:
    _check_runs(training)
    return training.rounds() >= rounds


def _check_runs(training: Training) -> None:
    if training.process.poll() is not None:
        raise RuntimeError("the run ended too early: " + "\n".join(training.lines[-3:]))


def refuse(folder: Path, what: str, address: str) -> dict[str, Any]:
    """Start a run whose head node cannot be joined."""
    training = Training.start(folder, *flags(folder, 2, actors=2, ray_address=address))
    code = training.wait()
    seconds = time.monotonic() - training.begin
    written = [path for path in folder.iterdir() if path.is_dir()]
    return {
        "fault": f"head node at the start: {what}",
        "code": code,
        "lines": len(training.lines),
        "seconds": seconds,
        "most_seconds": seconds,
        "same": not written,
        "said": training.lines[-1],
    }


def lose_head(folder: Path, rounds: int, expected: Path) -> dict[str, Any]:
    """Kill the head node during a run, start it again, and resume the run."""
    with head() as (address, processes):
        joined = flags(folder, rounds, actors=2, ray_address=address)
        training = Training.start(folder, *joined)
        until(partial(_reported, training, 2), "two rounds")
        for process in processes:
            _kill(process)
        begin = time.monotonic()
        code = training.wait()
        seconds = time.monotonic() - begin
    lines = [line for line in training.lines if line.startswith(("esper:", "ray: the head"))]
    run = run_of(folder)
    saved = load_latest(run).round
    with head() as (address, _):
        again = ["--resume", str(run), "--rounds", str(rounds), "--ray-address", address]
        resumed_code = Training.start(folder, *again).wait()
    return {
        "fault": f"SIGKILL of the head node after round {saved} of {rounds}, then --resume",
        "code": code,
        "lines": len(lines),
        "seconds": seconds,
        "most_seconds": seconds,
        "same": resumed_code == 0 and same_result(run, expected),
        "said": lines[-1] if lines else "",
    }


def lose_learner(folder: Path, rounds: int, expected: Path) -> dict[str, Any]:
    """Kill the learner during a run, and resume the run."""
    training = Training.start(folder, *flags(folder, rounds, actors=2))
    until(partial(_reported, training, 2), "two rounds")
    actors = actors_of(training.process.pid)
    training.process.kill()
    training.wait()
    seconds = until(lambda: not any(map(_lives, actors)), "end of the actors")
    run = run_of(folder)
    saved = load_latest(run).round
    resumed = Training.start(folder, "--resume", str(run), "--rounds", str(rounds))
    code = resumed.wait()
    return {
        "fault": f"SIGKILL of the learner after round {saved} of {rounds}, then --resume",
        "code": code,
        "lines": len(resumed.about("esper:")),
        "seconds": seconds,
        "most_seconds": seconds,
        "same": code == 0 and same_result(run, expected),
    }


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/ray_faults"))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=45, help="rounds of the run with kills")
    parser.add_argument("--few", type=int, default=6, help="rounds of the other runs")
    arguments = parser.parse_args()
    # Ray lets nobody without the token join the cluster that this starts.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    work = arguments.work
    few, many = (
        Path(kept(work / f"{rounds}.json", partial(alone, work / str(rounds), rounds)))
        for rounds in (arguments.few, arguments.rounds)
    )
    found = []
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        silent = f"127.0.0.1:{mute.getsockname()[1]}"
        faults = {
            "actors": partial(
                kill_actors, work / "actors", arguments.rounds, arguments.kills, many
            ),
            "closed": partial(refuse, work / "closed", "nothing listens", "127.0.0.1:9"),
            "silent": partial(refuse, work / "silent", "one that never answers", silent),
            "head": partial(lose_head, work / "head", arguments.few, few),
            "learner": partial(lose_learner, work / "learner", arguments.few, few),
        }
        for name, fault in faults.items():
            shutil.rmtree(work / name, ignore_errors=True)
            found.append(kept(work / f"{name}.json", fault))
            print(found[-1], flush=True)
    heads = ("fault", "exit status", "lines", "seconds", "nothing lost")
    rows = [
        (
            one["fault"],
            one["code"],
            one["lines"],
            f"{one['seconds']:.1f} (at most {one['most_seconds']:.1f})"
            if one["most_seconds"] > one["seconds"]
            else f"{one['seconds']:.1f}",
            "yes" if one["same"] else "NO",
        )
        for one in found
    ]
    settings = ", ".join(f"{name} {value}" for name, value in RUN.items())
    parts = (
        f"Two actors on one machine; {settings}. The lines are those on stderr that tell of the "
        "fault. The seconds are: for an actor, from its SIGKILL until its rollout was collected "
        "again, process start and imports included (median); at the start, until the command "
        f"ended (limit {START_SECONDS:.0f} s, plus imports); for the head node, until the run "
        f"ended (limit {HEAD_SECONDS:.0f} s, plus the time to close); for the learner, until none "
        "of its actors was left. Nothing is lost if checkpoint (every tensor) and events (without "
        "times) of the run are those of an undisturbed run of one process; of a refused run, if "
        "nothing was written.",
        table(heads, rows),
        f"{made_on('other work on the machine')}.",
    )
    title = "Faults of a run with actors on ray"
    # What was said names addresses of the machine.
    figures = [{name: x for name, x in one.items() if name != "said"} for one in found]
    publish("ray_faults", title, parts, arguments.write, figures)
    return 0 if all(one["same"] for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
