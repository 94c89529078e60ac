"""The ray cluster on which actors run: started on this machine, or joined by its address."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from esper.leyline.errors import UsageError
from esper.leyline.notices import notice

START_SECONDS = 60.0
"""Longest wait for a cluster when a run starts, and for CPUs that it does not have."""

PROCESS_SECONDS = 300.0
"""Longest wait for the processes of actors to start: on busy cores that takes minutes."""

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


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """The actors of a run.

    Attributes:
        count: number of actors.
        address: head node of their cluster, see ``Cluster``.
        lag: largest number of updates by which their weights may be behind.
        check: called while waiting for them; may raise.
    """

    count: int
    address: str | None
    lag: int
    check: Callable[[], None]


class ActorsLost(RuntimeError):
    """Actors, or the cluster they run on, were lost for good; the message says which, and why."""


def load_ray() -> Any:
    """The module ``ray``.

    Raises:
        UsageError: it is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = import_module("ray")
    except ImportError as error:
        raise UsageError(f"actors: ray is not installed: {INSTALL}") from error
    if getattr(module, "__file__", None) is None:
        # A folder of that name, such as the one that ray itself leaves among temporary files.
        raise UsageError(f"actors: ray is not installed: {INSTALL}")
    return module


class Cluster:
    """A connection of this process to a ray cluster.

    A connection that this process already has is used and stays open.

    Args:
        address: ``HOST:PORT`` of the head node, or ``auto`` for the cluster that this machine
            belongs to; None starts a cluster on this machine, which ends with this process.
        actors: number of actors it is for; each takes one CPU.

    Attributes:
        ray: the module.
        endpoints: host and port of the head node, and of ray's process on this machine.

    Raises:
        UsageError: ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str | None, actors: int):
        self.ray = load_ray()
        self._is_owner = not self.ray.is_initialized()
        if self._is_owner:
            self._connect(address, actors)
        host, _, port = self.ray.get_runtime_context().gcs_address.rpartition(":")
        self.endpoints = {"the head node": (host.strip("[]"), int(port))}
        number = self.ray.get_runtime_context().get_node_id()
        for node in self.ray.nodes():
            if node["NodeID"] == number:
                endpoint = node["NodeManagerAddress"], node["NodeManagerPort"]
                self.endpoints["ray on this machine"] = endpoint
        self._contacts = dict.fromkeys(self.endpoints, time.monotonic())
        if self._is_owner:
            what = "started a cluster on this machine" if address is None else f"joined {address}"
            notice(f"ray {self.ray.__version__}: {what}, for {actors} actors")

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
                    _try_to_join(address)
                    init(address)
        except UsageError:
            raise
        except Exception as error:  # ray raises that class itself when a node takes over 30 s
            reason = " ".join(str(error).split()) or type(error).__name__
            if address is None:
                raise UsageError(f"actors: ray could not be started ({reason})") from error
            raise UsageError(
                f"ray_address: no cluster could be joined at {address} ({reason}); start esper on "
                "a machine of the cluster, with RAY_AUTH_MODE=token if it asks for a token"
            ) from error

    def check(self) -> bool:
        """Whether the head node and ray's process on this machine accept connections now.

        To be asked before objects are stored or fetched: without its process on this machine, ray
        would end this one in the middle of that, without a word.

        Raises:
            ActorsLost: one of them has not for ``HEAD_SECONDS``.
        """
        now, all_there = time.monotonic(), True
        for name, (host, port) in self.endpoints.items():
            if reachable(host, port, seconds=2.0):
                self._contacts[name] = now
                continue
            all_there, missing = False, now - self._contacts[name]
            if missing > HEAD_SECONDS:
                raise ActorsLost(f"{name}, {host}:{port}, has been unreachable for {missing:.0f} s")
        return all_there

    def close(self) -> None:
        """Leave the cluster; a local one ends."""
        if self._is_owner:
            self.ray.shutdown()


def _try_to_join(address: str) -> None:
    """Join the cluster in a process that can be ended, because ray has no limit of its own.

    Raises:
        OSError: it could not be joined, or not within ``START_SECONDS``.
    """
    code = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"
    command = [sys.executable, "-P", "-c", code, address]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {START_SECONDS:.0f} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise OSError(lines[-1] if lines else f"status {done.returncode}")


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Within the context, discard what this process writes to the file descriptor of stderr.

    Ray's compiled part writes there that it follows the environment variable that silences it.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


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
