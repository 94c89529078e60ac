"""Training in a process that reports what it does, so that tests can kill it at a chosen point.

The processes are forked from one that has already imported everything, so that a start takes a
tenth of a second. Their output goes to files, which survive them.
"""

import atexit
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from esper.nissa import sinks
from esper.scripts.entry import run_guarded
from esper.scripts.output import protect_streams
from esper.scripts.train import train
from esper.simic.growth import environment
from esper.simic.ppo import PPOAgent
from esper.simic.run import run_process
from esper.simic.training import growth_trainee as growth
from esper.simic.training import vectorized
from processes import WATCHDOG

TINY = {
    "task": "digits", "envs": 2, "group_size": 2, "episode_length": 2, "max_batches": 1,
    "batch_size": 4, "lstm_hidden": 8, "seed": 5, "threads": 1, "backend": "torch",
}  # fmt: skip
"""The smallest run with an update, which spends much of its time writing checkpoints."""

STEPS_OF_A_SAVE = (
    (torch, "save"),
    (os, "fsync"),
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "read_bytes"),
    (shutil, "rmtree"),
)
"""The steps of a save on the disk, in order."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["esper.scripts.train", "esper.karn.report.page", "sklearn.datasets", "torch._dynamo"]
)


def flags(**settings: object) -> list[str]:
    """Settings as command-line flags."""
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in settings.items()
    ]


class Training:
    """``esper train ppo`` in a separate process.

    Args:
        arguments: flags.
        log: file for its output.
        halts: points at which it waits for ``proceed``; see ``POINTS``.
        ignored: signals that it ignores from its start, as under ``nohup``.
    """

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        halts: tuple[str, ...] = (),
        ignored: tuple[signal.Signals, ...] = (),
    ):
        self.log = log
        self._pipe, child_end = _CONTEXT.Pipe()
        named = (arguments, log, child_end, halts, ignored)
        self.process = _CONTEXT.Process(target=_train, args=named)
        self.process.start()
        # Python joins child processes at exit, and a failed test may leave this one halted.
        atexit.register(self.process.kill)
        child_end.close()
        self.messages: list[str] = []
        self._words: SimpleQueue[str | None] = SimpleQueue()
        # Messages are read at once: the process would block on a full pipe.
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._words.put(self._pipe.recv_bytes().decode())
        except (EOFError, ConnectionError):
            self._words.put(None)

    def hear(self) -> str | None:
        """The next message of the process, None once it has ended."""
        word = self._words.get(timeout=WATCHDOG)
        if word is None:
            self._words.put(None)
        else:
            self.messages.append(word)
        return word

    def wait_for(self, wanted: str) -> bool:
        """Read messages until ``wanted``; returns whether it came before the process ended."""
        while (word := self.hear()) is not None:
            if word == wanted:
                return True
        return False

    def proceed(self) -> None:
        """Let the halted process continue."""
        self._pipe.send_bytes(b"go on")

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> bool:
        """Send SIGKILL; returns whether the process was in a save."""
        self.process.kill()
        self.end()
        self.wait_for("nothing")
        saves = [word for word in self.messages if word in ("save begins", "save ends")]
        return bool(saves) and saves[-1] == "save begins"

    def end(self) -> int:
        """Wait for its end; returns the exit status, or minus the signal that ended it."""
        self.process.join(WATCHDOG)
        assert self.process.exitcode is not None, self.printed()
        return self.process.exitcode

    def printed(self) -> str:
        """Its output so far."""
        return self.log.read_text() if self.log.exists() else ""


def rounds_announced(printed: str) -> int:
    """The last round announced in the output."""
    return max((int(number) for number in re.findall(r"^round (\d+)/", printed, re.M)), default=0)


def _train(
    arguments: list[str],
    log: Path,
    pipe: Connection,
    halts: tuple[str, ...],
    ignored: tuple[signal.Signals, ...],
) -> None:
    """The main function of the process."""
    # A process started in the background of a shell ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The tests themselves may run under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    protect_streams()

    def say(word: str) -> None:
        pipe.send_bytes(word.encode())
        if word in halts:
            # A signal that arrives just before a blocking read would not be noticed until it ends.
            while not pipe.poll(0.05):
                pass
            pipe.recv_bytes()

    _report_saves(say)
    for point, (owner, name) in POINTS.items():
        _before(owner, name, lambda point=point: say(point))
    _report_handlers(say)
    say("started")
    sys.exit(run_guarded(train, ["ppo", *arguments]))


POINTS: dict[str, tuple[Any, str]] = {
    "building": (growth, "build_environment"),
    "opening": (vectorized, "_open"),
    "stepping": (environment.GrowthEnv, "step"),
    "updating": (PPOAgent, "update"),
    "reporting": (sinks, "write_parquet"),
}
"""Points at which a process may be halted, besides ``save begins`` and the steps of a save."""


def _report_saves(say: Callable[[str], None]) -> None:
    inside, original = [False], run_process.save

    def save(*arguments: Any) -> Path:
        say("save begins")
        inside[0] = True
        try:
            return original(*arguments)
        finally:
            inside[0] = False
            say("save ends")

    run_process.save = save
    for owner, name in STEPS_OF_A_SAVE:
        _before(owner, name, lambda name=name: say(name) if inside[0] else None)


def _report_handlers(say: Callable[[str], None]) -> None:
    """Report every change of the handler of SIGTERM."""
    original = signal.signal

    def listen(number: int, handler: Any) -> Any:
        before = original(number, handler)
        if number == signal.SIGTERM:
            say("listens otherwise")
        return before

    signal.signal = listen


def _before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Patch a function so that ``act`` is called before every call of it."""
    original = getattr(owner, name)

    def replacement(*arguments: Any, **named: Any) -> Any:
        act()
        return original(*arguments, **named)

    setattr(owner, name, replacement)


def pause(seconds: float) -> None:
    """Wait precisely by spinning: ``sleep`` takes longer than a step of a save."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
