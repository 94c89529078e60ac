"""The ray cluster on which actors run: started on this machine, or joined by its address."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from esper.leyline.errors import UsageError

START_SECONDS = 60.0
"""Longest wait for a cluster, and for the processes of all actors, when a run starts."""

HEAD_SECONDS = 30.0
"""Longest time for which the head node may be unreachable during a run. Less than the 60 s after
which ray itself ends a process that has lost it."""

OBJECT_STORE_BYTES = 200 * 2**20
"""Shared memory of a local cluster. Episodes and weights stay in it for an update; larger objects
go to the disk."""

INSTALL = "pip install 'esper-growth[ray]'"

_ENVIRONMENT = {
    # Ray would report its use over the network, repeat its own errors on the terminal, and end this
    # process when it has lost the head node: each of these is up to Esper.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class ActorsLost(RuntimeError):
    """Actors, or the cluster they run on, were lost for good; the message is one line."""


def load_ray() -> Any:
    """The module ``ray``.

    Raises:
        UsageError: it is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("ray")
    except ImportError as error:
        raise UsageError(f"actors: ray is not installed: {INSTALL}") from error


class Cluster:
    """A connection of this process to a ray cluster.

    A connection that this process already has is used and stays open.

    Args:
        address: ``HOST:PORT`` of the head node, or ``auto`` for the cluster that this machine
            belongs to; None starts a cluster on this machine, which ends with this process.
        actors: number of actors it is for; each takes one CPU.

    Attributes:
        ray: the module.
        head: host and port of the head node.

    Raises:
        UsageError: ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str | None, actors: int):
        self.ray = load_ray()
        self._owned = not self.ray.is_initialized()
        if self._owned:
            self._connect(address, actors)
        host, _, port = self.ray.get_runtime_context().gcs_address.rpartition(":")
        self.head = host.strip("[]"), int(port)
        self._seen = time.monotonic()
        if self._owned:
            what = "started a cluster on this machine" if address is None else f"joined {address}"
            print(f"ray {self.ray.__version__}: {what}, for {actors} actors", file=sys.stderr)

    def _connect(self, address: str | None, actors: int) -> None:
        init = partial(self.ray.init, log_to_driver=False, logging_level="ERROR")
        try:
            with _silent_stderr():
                if address is None:
                    # By name: else RAY_ADDRESS in the environment would name another one.
                    init(
                        "local",
                        num_cpus=actors,
                        num_gpus=0,
                        include_dashboard=False,
                        object_store_memory=OBJECT_STORE_BYTES,
                    )
                else:
                    check_address(address)
                    _within(START_SECONDS, partial(init, address))
        except UsageError:
            raise
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if address is None:
                raise UsageError(f"actors: ray could not be started ({reason})") from error
            raise UsageError(
                f"ray_address: no cluster could be joined at {address} ({reason}); start esper on "
                "a machine of the cluster, with RAY_AUTH_MODE=token if it asks for a token"
            ) from error

    def unreachable(self) -> float:
        """Seconds since the head node last accepted a connection; tries one now, for 2 s."""
        if reachable(*self.head, seconds=2.0):
            self._seen = time.monotonic()
            return 0.0
        return time.monotonic() - self._seen

    def check_head(self) -> bool:
        """Whether the head node can be reached.

        Raises:
            ActorsLost: not for ``HEAD_SECONDS``.
        """
        missing = self.unreachable()
        if missing > HEAD_SECONDS:
            host, port = self.head
            raise ActorsLost(
                f"ray: the head node {host}:{port} has been unreachable for {missing:.0f} s, so "
                "the run stops; its checkpoint is kept, and --resume continues it"
            )
        return missing == 0.0

    def close(self) -> None:
        """Leave the cluster; a local one ends."""
        if self._owned:
            self.ray.shutdown()


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Call a function that has no time limit of its own; ``TimeoutError`` if it takes longer."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if raised:
        raise raised[0]


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Within the context, discard what this process writes to the file descriptor of stderr.

    Ray's compiled part writes there that it follows the environment variable that silences it.
    """
    sys.stderr.flush()
    own = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)
        os.close(own)


def check_address(address: str) -> None:
    """Refuse an address at which nothing listens.

    Raises:
        UsageError: it is not ``auto`` or ``HOST:PORT``, or nothing answers within 10 s.
    """
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in address:
        raise UsageError(f"ray_address: must be HOST:PORT of a head node, or auto, got {address!r}")
    if not reachable(host.strip("[]"), int(port), seconds=10.0):
        raise UsageError(
            f"ray_address: nothing answers at {address}; start the head with ray start --head, or "
            "leave --ray-address out for a cluster on this machine"
        )


def reachable(host: str, port: int, seconds: float) -> bool:
    """Whether a connection to the port can be opened within ``seconds``."""
    try:
        socket.create_connection((host, port), seconds).close()
    except (OSError, OverflowError):
        return False
    return True
