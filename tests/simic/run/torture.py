"""Training as a user starts it, in a process that says what it does, so that it can be hit there.

The processes are forked from one that has imported everything already, so that a start takes a
tenth of a second. What they print goes to files, which outlive them.
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
from esper.scripts.entry import guarded
from esper.scripts.train import train
from esper.simic.growth import environment
from esper.simic.ppo import PPOAgent
from esper.simic.training import growth_trainee as growth
from esper.simic.training import session, vectorized
from processes import WATCHDOG

TINY = {
    "task": "digits",
    "envs": 2,
    "group_size": 2,
    "episode_length": 2,
    "max_batches": 1,
    "batch_size": 4,
    "lstm_hidden": 8,
    "seed": 5,
    "threads": 1,
    "backend": "torch",
}
"""The smallest run that has an update, so that much of its time goes into checkpoints."""

STEPS_OF_A_SAVE = (
    (torch, "save"),
    (os, "fsync"),
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "read_bytes"),
    (shutil, "rmtree"),
)
"""What a save does on the disk, one after another."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["esper.scripts.train", "sklearn.datasets", "torch._dynamo"])


def flags(**settings: object) -> list[str]:
    """Settings as a user types them."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


class Training:
    """``esper train ppo`` in a process of its own.

    Args:
        arguments: flags.
        log: file for what it prints.
        halts: points at which it waits until ``proceed``; see ``POINTS``.
    """

    def __init__(self, arguments: list[str], log: Path, halts: tuple[str, ...] = ()):
        self.log = log
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_train, args=(arguments, log, theirs, halts))
        self.process.start()
        # Left where it halts by a test that failed, it would be waited for at the end.
        atexit.register(self.process.kill)
        theirs.close()
        self.said: list[str] = []
        self._words: SimpleQueue[str | None] = SimpleQueue()
        # Words are taken at once: a process whose pipe is full would wait.
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._words.put(self._pipe.recv_bytes().decode())
        except (EOFError, ConnectionError):
            self._words.put(None)

    def hear(self) -> str | None:
        """The next thing it says, None once it has ended."""
        word = self._words.get(timeout=WATCHDOG)
        if word is None:
            self._words.put(None)
        else:
            self.said.append(word)
        return word

    def wait_for(self, wanted: str) -> bool:
        """Listen until it says ``wanted``; whether it did before it ended."""
        while (word := self.hear()) is not None:
            if word == wanted:
                return True
        return False

    def proceed(self) -> None:
        """Let it go on from where it halts."""
        self._pipe.send_bytes(b"go on")

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> bool:
        """SIGKILL; whether it fell inside a save."""
        self.process.kill()
        self.end()
        self.wait_for("nothing")
        saves = [word for word in self.said if word in ("save begins", "save ends")]
        return bool(saves) and saves[-1] == "save begins"

    def end(self) -> int:
        """Wait for its end; the exit status, or minus the signal that ended it."""
        self.process.join(WATCHDOG)
        assert self.process.exitcode is not None, self.printed()
        return self.process.exitcode

    def printed(self) -> str:
        """Everything it printed so far."""
        return self.log.read_text() if self.log.exists() else ""


def rounds_told(printed: str) -> int:
    """The last round that a user was told of."""
    return max((int(number) for number in re.findall(r"^round (\d+)/", printed, re.M)), default=0)


def _train(arguments: list[str], log: Path, pipe: Connection, halts: tuple[str, ...]) -> None:
    """What the process does."""
    # What starts in the background of a shell is born deaf to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sheet = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sheet, 1)
    os.dup2(sheet, 2)

    def say(word: str) -> None:
        pipe.send_bytes(word.encode())
        if word in halts:
            pipe.recv_bytes()

    _tell_of_saves(say)
    for point, (owner, name) in POINTS.items():
        _before(owner, name, lambda point=point: say(point))
    _tell_of_handlers(say)
    say("started")
    sys.exit(guarded(train, ["ppo", *arguments]))


POINTS: dict[str, tuple[Any, str]] = {
    "building": (growth, "build_environment"),
    "opening": (vectorized, "_open"),
    "stepping": (environment.GrowthEnv, "step"),
    "updating": (PPOAgent, "update"),
    "reporting": (sinks, "write_parquet"),
}
"""Where a process may be halted, besides ``save begins`` and the steps of a save."""


def _tell_of_saves(say: Callable[[str], None]) -> None:
    inside, original = [False], session.save

    def save(*arguments: Any) -> Path:
        say("save begins")
        inside[0] = True
        try:
            return original(*arguments)
        finally:
            inside[0] = False
            say("save ends")

    session.save = save
    for owner, name in STEPS_OF_A_SAVE:
        _before(owner, name, lambda name=name: say(name) if inside[0] else None)


def _tell_of_handlers(say: Callable[[str], None]) -> None:
    """Say so whenever another function listens for SIGTERM."""
    original = signal.signal

    def listen(number: int, handler: Any) -> Any:
        before = original(number, handler)
        if number == signal.SIGTERM:
            say("listens otherwise")
        return before

    signal.signal = listen


def _before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Have ``act`` called before every call of a function."""
    original = getattr(owner, name)

    def replacement(*arguments: Any, **named: Any) -> Any:
        act()
        return original(*arguments, **named)

    setattr(owner, name, replacement)


def pause(seconds: float) -> None:
    """Wait, exactly: a kernel's sleep is longer than a step of a save."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
