"""A race of whole training loops on one workload, in rounds in which every loop takes its turn.

Rounds are interleaved so that drift of the machine's speed affects all loops. The naive loop takes
part in every way of running it, and which way is best is decided by the timed rounds themselves: a
choice made beforehand may hold for another state of the machine.
"""

import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

import numpy as np
import torch
from hot_path_naive import NaiveBackend
from hot_path_workload import Loop, Workload
from numpy.typing import NDArray

from esper.tolaria.precision import Precision

ROUND = 10
"""Steps that a loop takes per round. Each finds its data in the cache after the first of them."""
FORMATS: dict[str, dict[str, Any]] = {
    "NCHW": {},
    "NHWC": {"channels_last": True},
    "NHWC flat": {"channels_last": True, "flat": True},
    "NHWC bfloat16": {"channels_last": True, "half": True},
    "compiled": {"compiled": True},
    "NHWC flat compiled": {"channels_last": True, "flat": True, "compiled": True},
    "NHWC bfloat16 compiled": {"channels_last": True, "half": True, "compiled": True},
}
"""Formats of the naive loop, as arguments of ``NaiveBackend``."""
PLAIN = tuple(name for name, arguments in FORMATS.items() if "compiled" not in arguments)
_ENDED = "a naive process ended; its error stands above"
_SPAWN = multiprocessing.get_context("spawn")


class Contender(Protocol):
    """A loop, or several that run at the same time."""

    def begin(self) -> None:
        """Begin a new episode; not timed."""

    def play(self, steps: int) -> None:
        """Take so many steps."""

    def end(self) -> None:
        """End the episode: update the policy and write the events."""

    def clear(self) -> None:
        """Forget the timings of the warm-up."""

    def close(self) -> None:
        """Give back what it holds."""


def naive_loop(workload: Workload, threads: int, form: str = "NCHW") -> Loop:
    """Return a naive loop with one of ``FORMATS``."""
    bare = replace(workload, precision=Precision(workload.device))
    made = partial(NaiveBackend, threads=threads, **FORMATS[form])
    return Loop(bare, "torch", instead=made)


def shares(workload: Workload, count: int) -> list[Workload]:
    """Divide the environments among at most ``count`` processes, in whole groups.

    A group shares a twin, which would have to be trained twice in two processes.
    """
    size = workload.growth("torch").group_size
    groups = -(-workload.envs // size)
    count = min(count, groups)
    ends = [min(workload.envs, size * (groups * i // count)) for i in range(count + 1)]
    return [
        replace(workload, first=workload.first + begin, envs=end - begin, threads=1)
        for begin, end in pairwise(ends)
    ]


class Processes:
    """Single-threaded processes, one per core, each with a naive loop over its share.

    A process keeps a loop for each format; only one of them runs at a time. Each process
    updates a policy of its own.

    Args:
        workload: the whole workload.
        count: largest number of processes.
        formats: names of ``FORMATS``.

    Attributes:
        shares: the workload of each process.
    """

    def __init__(self, workload: Workload, count: int, formats: Sequence[str]):
        self.shares = shares(workload, count)
        pipes = [_SPAWN.Pipe() for _ in self.shares]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            _SPAWN.Process(target=serve, args=(theirs, share, formats), daemon=True)
            for (_, theirs), share in zip(pipes, self.shares, strict=True)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()
        self._wait()

    def call(self, method: str, name: str, *given: int) -> None:
        """Call a method of the loops of one format in all processes, and wait for all of them.

        Raises:
            RuntimeError: a process has ended.
        """
        try:
            for connection in self.connections:
                connection.send((method, name, given))
        except OSError as error:
            raise RuntimeError(_ENDED) from error
        self._wait()

    def close(self) -> None:
        """End the processes."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join()

    def _wait(self) -> None:
        try:
            for connection in self.connections:
                connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(_ENDED) from error


def serve(connection: Connection, workload: Workload, formats: Sequence[str]) -> None:
    """Run naive loops in this process as ``Processes.call`` asks, until the connection closes."""
    torch.set_num_threads(1)
    loops = {name: naive_loop(workload, 1, name) for name in formats}
    connection.send(None)
    try:
        while True:
            method, name, given = connection.recv()
            getattr(loops[name], method)(*given)
            connection.send(None)
    except EOFError:
        for loop in loops.values():
            loop.close()


@dataclass(frozen=True, slots=True)
class Share:
    """The loops of one format in all processes, as a contender."""

    processes: Processes
    name: str

    def begin(self) -> None:
        """See ``Contender.begin``."""
        self.processes.call("begin", self.name)

    def play(self, steps: int) -> None:
        """See ``Contender.play``."""
        self.processes.call("play", self.name, steps)

    def end(self) -> None:
        """See ``Contender.end``."""
        self.processes.call("end", self.name)

    def clear(self) -> None:
        """See ``Contender.clear``."""
        self.processes.call("clear", self.name)

    def close(self) -> None:
        """See ``Contender.close``; the processes serve other contenders too."""


class NaiveWays:
    """The naive loop in every way, as contenders by name; a context that ends their processes.

    The ways are one single-threaded process per core in all ``formats``, and one process with all
    threads in those that are not compiled; on a GPU, which computes one after the other, one
    process.

    Args:
        workload: the workload; its ``threads`` are the cores.
        formats: names of ``FORMATS``.
    """

    def __init__(self, workload: Workload, formats: Sequence[str]):
        on_cpu = workload.device == "cpu"
        cores = workload.threads if on_cpu else 1
        self.contenders: dict[str, Contender] = {
            f"{cores} {'thread' if cores == 1 else 'threads'}, {name}": naive_loop(
                workload, cores, name
            )
            for name in formats
            if name in PLAIN or not on_cpu
        }
        self.processes: Processes | None = None
        if on_cpu:
            self.processes = Processes(workload, cores, formats)
            count = len(self.processes.shares)
            for name in formats:
                self.contenders[f"{count} x 1 thread, {name}"] = Share(self.processes, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for contender in self.contenders.values():
            contender.close()
        if self.processes is not None:
            self.processes.close()


def race(
    contenders: dict[str, Contender], workload: Workload, episodes: int
) -> dict[str, NDArray[np.float64]]:
    """Play whole episodes of all contenders in rounds, after a warm-up episode.

    Returns:
        Seconds of every timed round by contender, ``[R]`` each. The last round of an episode has
        the update of the policy in it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for episode in range(-1, episodes):
        # The warm-up is a whole episode, in which everything is compiled that will be timed.
        length = workload.episode_length
        for contender in contenders.values():
            if episode == 0:
                contender.clear()
            contender.begin()
        for begin in range(0, length, ROUND):
            count = min(ROUND, length - begin)
            for name, contender in contenders.items():
                before = time.perf_counter()
                contender.play(count)
                if begin + count == length:
                    contender.end()
                if episode >= 0:
                    seconds[name].append(time.perf_counter() - before)
        print(f"{episode + 2} of {episodes + 1} episodes are over", file=sys.stderr, flush=True)
    return {name: np.array(taken) for name, taken in seconds.items()}


@dataclass(frozen=True, slots=True)
class Naive:
    """The naive loop in the way that is best in each round.

    Attributes:
        fastest: seconds of the fastest way in every round, ``[R]``.
        way: name of the way with the least total.
        won: number of rounds in which each way was the fastest.
    """

    fastest: NDArray[np.float64]
    way: str
    won: dict[str, int]


def best_naive(seconds: dict[str, NDArray[np.float64]], ways: Sequence[str]) -> Naive:
    """Choose the fastest of the naive ``ways`` anew in every round of a race."""
    table = np.stack([seconds[way] for way in ways])
    winners = table.argmin(0)
    return Naive(
        fastest=table.min(0),
        way=ways[int(table.sum(1).argmin())],
        won={way: int((winners == i).sum()) for i, way in enumerate(ways)},
    )
