"""SIGKILL, SIGTERM, SIGINT and SIGHUP at random moments; every run ends in the same bits."""

import os
import random
import signal
import time
from pathlib import Path

from torture.common import Part, quiet, timed

ROUNDS = 12


class _Captured:
    """Stands for pytest's ``capsys``: what this process wrote to stderr while it read a run."""

    def __init__(self) -> None:
        self.err = ""

    def readouterr(self) -> "_Captured":
        return self


def sigkills(work: Path, kills: int = 200, inside: int = 40) -> Part:
    """Kill training again and again; no announced round is lost."""
    from test_torture import Chain, Uninterrupted

    part = Part(f"SIGKILL, at least {inside} of them within a save")
    with timed(part):
        reference = Uninterrupted(work / "reference", ROUNDS)
        draws, done, done_inside, chains = random.Random(11), 0, 0, 0
        while done < kills or done_inside < inside:
            chains += 1
            chain, before = Chain(work / f"chain-{chains}", reference), 0
            while before < ROUNDS and (done < kills or done_inside < inside):
                training = chain.resume()
                done_inside += chain.kill(training, draws, done_inside < inside and done % 3 > 0)
                done += training.end() == -signal.SIGKILL
                part.tried = done
                now = _checked(chain, training)
                if now < before:
                    part.lost.append(f"round {now} after round {before}")
                before = now
            if before < ROUNDS and chain.resume().end() != 0:
                part.lost.append("a resumed run failed")
            chain.check_end()
        part.notes = f"{done_inside} within a save, {chains} runs, all ended in the same bits"
    return part


def _checked(chain: object, training: object) -> int:
    captured = _Captured()
    with quiet() as told:
        done = chain.check(training, captured)  # type: ignore[attr-defined]
    if told.getvalue():
        raise AssertionError(told.getvalue())
    return int(done)


def signals(work: Path, number: signal.Signals, count: int) -> Part:
    """Send a signal at random moments; the run ends with its checkpoint and its exit status."""
    from killed_training import pause
    from test_torture import Chain, Uninterrupted

    part = Part(signal.Signals(number).name)
    slowest, early = 0.0, 0
    with timed(part):
        reference = Uninterrupted(work / "reference", ROUNDS)
        draws, chains = random.Random(int(number)), 0
        while part.tried < count:
            chains += 1
            chain, before = Chain(work / f"chain-{chains}", reference), 0
            while before < ROUNDS and part.tried < count:
                training = chain.resume()
                if not training.wait_for("started"):
                    raise AssertionError(training.printed())
                pause(draws.uniform(0.0, reference.seconds))
                begin = time.monotonic()
                training.send(number)
                code = training.end()
                slowest = max(slowest, time.monotonic() - begin)
                part.tried += 1
                # Before the run directory exists the signal ends the process at once.
                at_once = code == -number or (code == 130 and chain.run is None)
                early += at_once
                if code not in (0, 128 + number) and not at_once:
                    part.lost.append(f"exit status {code}")
                if "Traceback" in training.printed():
                    part.lost.append(training.printed()[-300:])
                before = max(before, _checked(chain, training))
            if before < ROUNDS and chain.resume().end() != 0:
                part.lost.append("a resumed run failed")
            chain.check_end()
        part.notes = f"{chains} runs; the slowest end took {slowest:.1f} s; {early} ended in set-up"
    return part


def sanctum(work: Path, run: Path, kills: int = 100) -> Part:
    """Kill Sanctum while it shows a run; the run is untouched."""
    from pseudo_terminal import OnTerminal
    from test_torture import contents

    part = Part("SIGKILL of Sanctum")
    with timed(part):
        before = contents(run)
        draws = random.Random(4)
        for _ in range(kills):
            terminal = OnTerminal("sanctum", str(run))
            if draws.random() < 0.5:
                terminal.until(lambda output: len(output) > 2_000)
            end = time.monotonic() + draws.uniform(0.0, 1.0)
            while time.monotonic() < end and terminal.read():
                pass
            os.kill(terminal.pid, signal.SIGKILL)
            terminal.close()
            part.tried += 1
            if contents(run) != before:
                part.lost.append("the run was changed")
    return part
