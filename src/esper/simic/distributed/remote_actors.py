"""The learner's side of its actors: what they are given to do, and what they deliver.

Ray starts the actors, restarts those that die, and repeats the call that was lost with them. A call
contains all that its result depends on (number of the rollout, weights, state before it), so a
repeated one delivers the same rollout.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

import torch

from esper.leyline.errors import UsageError, first_line
from esper.leyline.notices import notice
from esper.simic.distributed.cluster import (
    PROCESS_SECONDS,
    START_SECONDS,
    ActorsLost,
    Cluster,
)
from esper.simic.distributed.wire import size_of

POLL_SECONDS = 0.5
"""Longest wait before a stop signal is noticed and the head node is tried."""

SILENT_SECONDS = PROCESS_SECONDS
"""Longest time for which an actor may answer nothing, restarts included."""

LONGEST_REASON = 160
"""Characters of one of ray's messages that are quoted."""

MAX_REPEATS = 3
"""How often ray repeats a rollout whose actor died during it, before the run stops."""


class Shard(Protocol):
    """Environments in the process of an actor."""

    def describe(self) -> Any:
        """What the learner needs to know of the shard, as plain values."""
        ...

    def collect(self, number: int, weights: dict[str, Any], before: Any) -> tuple[Any, Any]:
        """Collect a rollout.

        Args:
            number: number of the rollout, part of the key of every random draw.
            weights: weights and moments to act with, as arrays.
            before: state of the environments at the end of the last rollout, as this function
                returned it; None if there was none.

        Returns:
            the rollout and the state of the environments after it, as arrays.
        """
        ...


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """The process of an actor: its machine and its number there."""

    host: str
    number: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A rollout of one actor.

    Attributes:
        version: number of updates after which the weights were those that acted.
        rollout: see ``Shard.collect``.
        after: state of the environments after it.
        process: where it was collected.
    """

    version: int
    rollout: Any
    after: Any
    process: ActorProcess


class ShardProcess:
    """Runs in the process of an actor: builds its shard when it is first needed, and collects.

    Args:
        make: makes the shard from ``spec`` and ``shared``; must be importable on every machine.
        spec: plain data.
        shared: plain data that all actors have in common.
    """

    def __init__(self, make: Callable[[Any, Any], Shard], spec: Any, shared: Any):
        self._make, self._spec, self._shared = make, spec, shared
        self._shard: Shard | None = None

    def process(self) -> ActorProcess:
        """Answer from a thread of its own, so that a rollout does not delay it."""
        return ActorProcess(socket.gethostname(), os.getpid())

    def describe(self) -> Any:
        """See ``Shard.describe``."""
        return self._get_shard().describe()

    def collect(self, number: int, version: int, weights: dict[str, Any], before: Any) -> Delivery:
        """See ``Shard.collect``."""
        return Delivery(
            version, *self._get_shard().collect(number, weights, before), self.process()
        )

    def _get_shard(self) -> Shard:
        # The setting belongs to the thread, and ray may call from several.
        torch.set_num_threads(1)
        self._shard = self._shard or self._make(self._spec, self._shared)
        return self._shard


@dataclass(slots=True)
class _Remote:
    """An actor as the learner sees it.

    Attributes:
        handle: ray's handle.
        process: its process, as far as is known.
        next: number of the rollout that it is given next.
        after: state of its environments after its last rollout.
        call: the rollout in progress.
        deliveries: rollouts that no round has taken yet, oldest first.
        pending_ping: the unanswered ping, and since when it is unanswered.
    """

    handle: Any
    process: ActorProcess
    next: int = 1
    after: Any = None
    call: Any = None
    deliveries: deque[Delivery] = field(default_factory=deque)
    pending_ping: tuple[Any, float] | None = None


class RemoteActors:
    """Actors that collect the rollouts of every round, each those of its own environments.

    In round k an actor may act with the weights after any update from k - 1 - ``lag`` to k - 1, and
    takes the latest there are when it begins. With a lag of 0 all wait for the update, so the
    result is that of one process. Otherwise an actor goes on with the next rollout while the
    learner updates.

    Args:
        cluster: where they run.
        make, specs, shared: see ``ShardProcess``; one actor per spec.
        lag: most updates by which the weights of a rollout may be behind.
        last: number of the last rollout.
        environments: number of environments of all actors.

    Attributes:
        descriptions: see ``Shard.describe``, of each actor.

    Raises:
        UsageError: a shard cannot be built, the cluster has no room for the actors, or they or the
            head node were lost before the first rollout.
    """

    def __init__(
        self,
        cluster: Cluster,
        make: Callable[[Any, Any], Shard],
        specs: Sequence[Any],
        shared: Any,
        lag: int,
        last: int,
        environments: int,
    ):
        self.cluster, self.ray, self.lag, self.last = cluster, cluster.ray, lag, last
        self._environments = environments
        remote = self.ray.remote(
            num_cpus=1,
            max_restarts=-1,
            max_task_retries=MAX_REPEATS,
            concurrency_groups={"pings": 1},
        )(ShardProcess)
        # Kept: an actor that is started again is made from it again.
        self._shared = self.ray.put(shared)
        handles = [remote.remote(make, spec, self._shared) for spec in specs]
        try:
            processes = self._processes(handles)
            self._actors = [_Remote(*pair) for pair in zip(handles, processes, strict=True)]
            self.descriptions = self._descriptions()
        except BaseException as error:
            for handle in handles:
                self.ray.kill(handle)
            if isinstance(error, ActorsLost):
                raise UsageError(f"actors: {error}") from error
            raise
        self._has_announced = False

    def begin(self, number: int, states: Sequence[Any]) -> None:
        """Begin with rollout ``number``, of environments in the given states."""
        for actor, state in zip(self._actors, states, strict=True):
            actor.next, actor.after = number, state

    def collect(
        self, number: int, weights: dict[str, Any], check: Callable[[], None]
    ) -> list[Delivery]:
        """The rollouts ``number``, one per actor, which are collected with the latest weights.

        Args:
            number: number of the round, one more than in the call before.
            weights: weights and moments after update ``number - 1``, as arrays.
            check: called while waiting; may raise.

        Raises:
            ActorsLost: an actor or the head node cannot be reached any more, or the same rollout
                ended its process again and again.
            UsageError: an actor met a mistake in the input.
        """
        while not self.cluster.check():
            check()
            time.sleep(POLL_SECONDS)
        version, reference = number - 1, self.ray.put(weights)
        while True:
            for actor in self._actors:
                self._dispatch(actor, version, reference)
            if all(actor.deliveries for actor in self._actors):
                break
            calls = {actor.call: actor for actor in self._actors if actor.call is not None}
            # Without fetching: if ray's process here died during a fetch, this one would end too.
            ready, _ = self.ray.wait(
                list(calls), num_returns=1, timeout=POLL_SECONDS, fetch_local=False
            )
            check()
            if not ready:
                self._check_alive(list(calls.values()))
            elif not self.cluster.check():
                time.sleep(POLL_SECONDS)
                continue
            for call in ready:
                self._receive(calls[call], version, reference)
        deliveries = [actor.deliveries.popleft() for actor in self._actors]
        if not self._has_announced:
            self._has_announced = True
            self._announce(deliveries, size_of(weights))
        return deliveries

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self.ray.kill(actor.handle)

    # --- rollouts -----------------------------------------------------------------------------

    def _dispatch(self, actor: _Remote, version: int, weights: Any) -> None:
        """Let an idle actor begin its next rollout, if the weights are new enough for it."""
        due = actor.next <= self.last and actor.next - 1 - version <= self.lag
        if actor.call is None and due:
            actor.call = self._call(actor, version, weights)
            actor.next += 1

    def _call(self, actor: _Remote, version: int, weights: Any, number: int | None = None) -> Any:
        number = actor.next if number is None else number
        return actor.handle.collect.remote(number, version, weights, actor.after)

    def _receive(self, actor: _Remote, version: int, weights: Any) -> None:
        errors = self.ray.exceptions
        number = actor.next - 1
        try:
            delivery: Delivery = self.ray.get(actor.call)
        except errors.RayTaskError as error:
            if isinstance(error.cause, UsageError):
                raise error.cause from error
            raise
        except (errors.RayActorError, errors.ObjectLostError) as error:
            if not self.cluster.check():
                # Nothing is known of the actor until the head node answers.
                time.sleep(POLL_SECONDS)
                actor.call = self._call(actor, version, weights, number)
                return
            raise ActorsLost(
                f"{self._name(actor)} was lost {MAX_REPEATS + 1} times in rollout {number} "
                f"({first_line(error)[:LONGEST_REASON]})"
            ) from error
        if delivery.process != actor.process:
            old, new = actor.process, delivery.process
            notice(
                f"ray: {self._name(actor)} was lost (process {old.number} on {old.host}) and "
                f"started again (process {new.number} on {new.host}); rollout {number} was "
                "collected again"
            )
        actor.process, actor.after, actor.call = delivery.process, delivery.after, None
        actor.pending_ping = None
        actor.deliveries.append(delivery)

    def _name(self, actor: _Remote) -> str:
        index = next(i for i, candidate in enumerate(self._actors) if candidate is actor)
        return f"actor {index + 1} of {len(self._actors)}"

    def _announce(self, deliveries: list[Delivery], weights: int) -> None:
        """Print what a round transports."""
        rollouts = sum(
            size_of(delivery.rollout) + size_of(delivery.after) for delivery in deliveries
        )
        notice(
            f"ray: the rollout of an environment has {rollouts // self._environments:,} bytes, "
            f"and the weights after an update have {weights:,} bytes"
        )

    # --- whether they live --------------------------------------------------------------------

    def _check_alive(self, waiting: list[_Remote]) -> None:
        """Ask the actors that work whether they still live.

        Raises:
            ActorsLost: one has answered nothing for ``SILENT_SECONDS``, or the head node is gone.
        """
        if not self.cluster.check():
            return
        for actor in waiting:
            if actor.pending_ping is not None:
                ping, since = actor.pending_ping
                if self.ray.wait([ping], timeout=0)[0]:
                    actor.pending_ping = None
                elif time.monotonic() - since > SILENT_SECONDS:
                    raise ActorsLost(
                        f"{self._name(actor)} has answered nothing for {SILENT_SECONDS:.0f} s"
                    )
            if actor.pending_ping is None:
                actor.pending_ping = self._ping(actor.handle), time.monotonic()

    def _ping(self, handle: Any) -> Any:
        return handle.process.options(concurrency_group="pings").remote()

    # --- the start ----------------------------------------------------------------------------

    def _processes(self, handles: list[Any]) -> list[ActorProcess]:
        """The processes of the actors, once all have started."""
        pings = [self._ping(handle) for handle in handles]
        begin = time.monotonic()
        ready: list[Any] = []
        while len(ready) < len(pings):
            ready, _ = self.ray.wait(
                pings, num_returns=len(pings), timeout=POLL_SECONDS, fetch_local=False
            )
            duration = time.monotonic() - begin
            # In this order: without the head node, ray would wait to be told of the CPUs.
            if duration < START_SECONDS or not self.cluster.check() or len(ready) == len(pings):
                continue
            cpus = self.ray.cluster_resources().get("CPU", 0.0)
            limit = START_SECONDS if cpus < len(pings) else PROCESS_SECONDS
            if duration > limit:
                raise UsageError(
                    f"actors: {len(ready)} of {len(pings)} started within {limit:.0f} s; each "
                    f"takes a CPU, and the cluster has {cpus:.0f}; take fewer actors"
                )
        try:
            return self.ray.get(pings)
        except self.ray.exceptions.RayError as error:
            reason = first_line(error)[:LONGEST_REASON]
            raise UsageError(
                f"actors: an actor could not be started ({reason}); Esper must be installed on "
                "every machine of the cluster"
            ) from error

    def _descriptions(self) -> list[Any]:
        """Build the shards; raises what an actor raised."""
        waiting = [actor.handle.describe.remote() for actor in self._actors]
        for actor, call in zip(self._actors, waiting, strict=True):
            while not self.ray.wait([call], timeout=POLL_SECONDS)[0]:
                self._check_alive([actor])
            actor.pending_ping = None
        try:
            return self.ray.get(waiting)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UsageError):
                raise error.cause from error
            raise
        except self.ray.exceptions.RayActorError as error:
            reason = first_line(error)[:LONGEST_REASON]
            raise UsageError(
                f"actors: an actor died while it built its environments ({reason})"
            ) from error


def mean_lag(deliveries: Sequence[Delivery], number: int, most: int) -> float | None:
    """Mean number of updates by which the weights of round ``number`` were behind.

    None if ``most`` is 0: then all rounds are collected with the weights that learn.
    """
    return fmean(number - 1 - one.version for one in deliveries) if most else None
