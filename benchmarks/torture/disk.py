"""A disk that is full, cannot be written or loses the run; a clock that goes back; NaN."""

import errno
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from esper.leyline import disk
from esper.leyline.errors import UsageError
from esper.simic.ppo import PPOAgent
from esper.simic.run import checkpoint
from esper.simic.run.checkpoint import load_latest
from esper.simic.training import growth_trainee
from torture.cases import begun, called, cases, clear, printed
from torture.common import TINY, Part, differs, fresh, quiet, resumed, timed, trained

OFFSETS, REMOVALS, NAN_TIMES = 40, 10, 10


@contextmanager
def _room_for(size: int) -> Iterator[None]:
    """Within the context, files of checkpoints and settings have ``size`` bytes in all."""
    left = [size]

    def write(path: Path, content: bytes) -> None:
        kept, left[0] = content[: left[0]], left[0] - len(content)
        path.write_bytes(kept)
        if left[0] < 0:
            left[0] = 0
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with patch.object(disk, "write_synced", write), patch.object(checkpoint, "write_synced", write):
        yield


def full_disk(work: Path) -> Part:
    """Fill the disk at many places of a save; earlier checkpoints stay, and a later save works."""
    part = Part(f"disk full at {OFFSETS} places of a save")
    with timed(part):
        base = trained(work / "base", 2)
        size = sum(path.stat().st_size for path in (base / "checkpoints" / "000002").iterdir())
        reference = fresh(base, work / "reference")
        resumed(reference, 3)
        for number in range(OFFSETS):
            run = fresh(base, work / "full")
            before = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
            room = (run / "config.json").stat().st_size + 2_000 + size * number // OFFSETS
            with _room_for(room):
                try:
                    resumed(run, 3)
                except UsageError as error:
                    part.lost.append(f"refused with {room} bytes: {error}")
            after = {path: path.read_bytes() for path in before if path.exists()}
            if after != before:
                part.lost.append(f"an earlier checkpoint changed with {room} bytes")
            if any(p.name.startswith(".draft") for p in (run / "checkpoints").iterdir()):
                part.lost.append(f"a draft is left with {room} bytes")
            resumed(run, 3)
            found = differs(run, reference)
            if found:
                part.lost.append(f"{found}, with {room} bytes")
            part.tried += 1
    return part


def not_writable(work: Path) -> Part:
    """Directories that cannot be written: one line, exit status 2, nothing changed."""
    part = Part("directory that cannot be written")
    with timed(part):
        from processes import called

        base = trained(work / "base", 2)
        (work / "file").touch()
        tiny = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
        for place in (
            work / "file",
            work / "file" / "below",
            Path("/proc/esper"),
            Path("/dev/null"),
        ):
            done = called(["train", "ppo", *tiny, f"--telemetry-dir={place}"], work)
            if done.returncode != 2 or done.stderr.count("\n") != 1:
                part.lost.append(f"{place}: {done.returncode} {done.stderr[:200]}")
            part.tried += 1
        before = {p: p.read_bytes() for p in base.rglob("*") if p.is_file()}
        original = Path.open

        def read_only(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
            if base in path.parents and set(mode) & set("wa+x"):
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return original(path, mode, *more, **named)

        with patch.object(Path, "open", read_only):
            done = called(["train", "ppo", "--resume", str(base), "--rounds=3"], work)
        if done.returncode != 2 or "Traceback" in done.stderr:
            part.lost.append(f"resume: {done.returncode} {done.stderr[:300]}")
        if {p: p.read_bytes() for p in base.rglob("*") if p.is_file()} != before:
            part.lost.append("a run on a disk that is read only was changed")
        part.tried += 1
    return part


def removed(work: Path) -> Part:
    """Remove the run directory at ten points; the process ends by itself, without a traceback."""
    from killed_training import Training, flags

    part = Part(f"run directory removed at {REMOVALS} points")
    points = ("stepping", "updating", "save begins", "mkdir", "fsync", "rename")
    with timed(part):
        for number in range(REMOVALS):
            point, times = points[number % len(points)], 1 + number // len(points)
            folder = work / f"run-{number}"
            log = work / f"{number}.log"
            settings = {"telemetry_dir": folder, "rounds": 4}
            training = Training(flags(**TINY, **settings), log, (point,))
            for _ in range(times):
                training.wait_for(point)
                if _ + 1 < times:
                    training.proceed()
            for run in folder.iterdir():
                shutil.rmtree(run, ignore_errors=True)
            while training.process.is_alive():
                try:
                    training.proceed()
                except OSError:
                    break
                training.process.join(0.02)
            code, told = training.end(), training.printed()
            if code not in (0, 1) or "Traceback" in told:
                part.lost.append(f"{point}: {code} {told[-300:]}")
            part.tried += 1
    return part


def vanished(work: Path) -> Part:
    """Remove what each writing command has written so far; it ends without a traceback."""
    part = Part(f"what a command writes removed, {REMOVALS} times each (`evaluate` once)")
    draws, outcomes = random.Random(3), Counter[str]()
    folder = work / "disk"
    folder.mkdir()
    with timed(part):
        for case in cases(work):
            log, begin = work / f"{case.name}.log", time.monotonic()
            case.fill(folder)
            called(case.first(folder), log)
            seconds = time.monotonic() - begin
            for _ in range(1 if case.continues else REMOVALS):
                case.fill(folder)
                process = begun(case.first(folder), log)
                process.join(draws.uniform(0.1, 1.0) * seconds)
                clear(folder, beside_a_writer=True)
                process.join()
                output = printed(log)
                part.tried += 1
                outcomes[f"{case.name} {process.exitcode}"] += 1
                if process.exitcode not in (0, 1, 2) or "Traceback" in output:
                    part.lost.append(f"{case.name}: {process.exitcode} {output[-300:]}")
        part.notes = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    return part


def _going_back(seconds: float) -> Callable[[], float]:
    """A clock that is set back again and again, by up to ``seconds``."""
    begin, original, draw = time.time(), time.time, random.Random(1).random
    return lambda: original() - seconds * draw() if draw() < 0.5 else begin


def clock(work: Path) -> Part:
    """Set the clock back during training; the result is the same."""
    from esper.karn.report.gather import RunData
    from esper.karn.runs import inspect

    part = Part("clock set back during training")
    with timed(part):
        reference = trained(work / "reference", 3)
        for back in (1.0, 3_600.0, 1e9, 1.7e9):
            with patch.object(time, "time", _going_back(back)):
                run = trained(work / f"back-{back:.0f}", 3)
            found = differs(run, reference)
            with quiet():
                if inspect(run).status != "finished" or len(RunData(run).rounds) != 3:
                    found += " readers"
            if found:
                part.lost.append(f"{back} s: {found}")
            part.tried += 1
    return part


def _in_rollout(name: str) -> Callable[[Any], None]:
    def spoil(rollout: Any) -> None:
        tensor = getattr(rollout, name)
        tensor.view(-1)[-1] = math.nan

    return spoil


def not_finite(work: Path) -> Part:
    """Put NaN at seven points of an update; it is refused, and the weights stay."""
    part = Part(f"NaN at 7 points, {NAN_TIMES} times each")
    points = ("rewards", "values", "log_prob", "last_value", "host", "weights", "moments")
    with timed(part):
        for point in points:
            for number in range(NAN_TIMES):
                found = _with_nan(work / f"{point}-{number}", point, number)
                part.lost += [f"{point} {number}: {found}"] if found else []
                part.tried += 1
    return part


def _with_nan(folder: Path, point: str, number: int) -> str:
    """Train three rounds of which the second meets NaN; says what is wrong."""
    collect, before = growth_trainee.collect, {}  # type: ignore[attr-defined]
    agents: list[PPOAgent[Any]] = []

    def spoilt(environment: Any, actor: Any, index: int, on_step: Any) -> Any:
        rollout = collect(environment, actor, index, on_step)
        if index == 2:
            agent = agents[0]
            before.update({n: p.detach().clone() for n, p in agent.policy.named_parameters()})
            if point == "host":
                rollout.observation.host.view(-1)[number] = math.nan
            elif point == "weights":
                name = sorted(before)[number % len(before)]
                dict(agent.policy.named_parameters())[name].data.view(-1)[0] = math.nan
                before[name].view(-1)[0] = math.nan
            elif point == "moments":
                states = list(agent.optimizer.adam.state.values())
                states[number % len(states)]["exp_avg"].view(-1)[0] = math.nan
            else:
                _in_rollout(point)(rollout)
        return rollout

    original = PPOAgent.__init__

    def made(agent: Any, *arguments: Any, **named: Any) -> None:
        original(agent, *arguments, **named)
        agents.append(agent)

    after: dict[str, torch.Tensor] = {}
    update = PPOAgent.update

    def updated(agent: Any, rollout: Any) -> Any:
        metrics = update(agent, rollout)
        if agent.updates == 2:
            after.update({n: p.detach().clone() for n, p in agent.policy.named_parameters()})
        return metrics

    with (
        patch.object(growth_trainee, "collect", spoilt),
        patch.object(PPOAgent, "__init__", made),
        patch.object(PPOAgent, "update", updated),
    ):
        run = trained(folder, 3, seed=number)
    if load_latest(run).round != 3:
        return "rounds are missing"
    same = all(torch.equal(before[n].nan_to_num(7.0), after[n].nan_to_num(7.0)) for n in before)
    if not same:
        return "weights moved"
    told = (run / "events.jsonl").read_text()
    return "" if "UPDATE_REFUSED" in told else "not refused"
