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
    ActorSettings,
    ActorsLost,
    Cluster,
)
from esper.simic.distributed.wire import as_arrays, as_tensors, size_of

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
            weights: weights and moments to act with.
            before: state of the environments at the end of the last rollout, as this function
                returned it; None if there was none.

        Returns:
            the rollout and the state of the environments after it.
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
        rollout, after: see ``Shard.collect``; as arrays.
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
        """See ``Shard.collect``; what travels has arrays for tensors."""
        shard = self._get_shard()
        rollout, after = as_arrays(shard.collect(number, as_tensors(weights), as_tensors(before)))
        return Delivery(version, rollout, after, self.process())

    def _get_shard(self) -> Shard:
        # The setting belongs to the thread, and ray may call from several.
        torch.set_num_threads(1)
        self._shard = self._shard or self._make(self._spec, self._shared)
        return self._shard


@dataclass(eq=False, slots=True)
class _Remote:
    """An actor as the learner sees it.

    Attributes:
        handle: ray's handle.
        process: its process, as far as is known; None until it has started.
        next: number of the rollout that it is given next.
        after: state of its environments after its last rollout.
        call: the rollout in progress.
        deliveries: rollouts that no round has taken yet, oldest first.
        pending_ping: the unanswered ping, and since when it is unanswered.
    """

    handle: Any
    process: ActorProcess | None = None
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
        settings: how many there are, and where.
        make, specs, shared: see ``ShardProcess``; one actor per spec.
        last: number of the last rollout.
        environments: number of environments of all actors.

    Attributes:
        descriptions: see ``Shard.describe``, of each actor.

    Raises:
        UsageError: there is no cluster, a shard cannot be built, the cluster has no room for the
            actors, or they or the head node were lost before the first rollout.
    """

    def __init__(
        self,
        settings: ActorSettings,
        make: Callable[[Any, Any], Shard],
        specs: Sequence[Any],
        shared: Any,
        last: int,
        environments: int,
    ):
        self.lag, self.last, self._check = settings.lag, last, settings.check
        self._environments = environments
        self.cluster = Cluster(settings.address, settings.count)
        self.ray = self.cluster.ray
        self._actors: list[_Remote] = []
        try:
            remote = self.ray.remote(
                num_cpus=1,
                max_restarts=-1,
                max_task_retries=MAX_REPEATS,
                concurrency_groups={"pings": 1},
            )(ShardProcess)
            # Kept: an actor that is started again is made from it again.
            self._shared = self.ray.put(shared)
            self._actors = [_Remote(remote.remote(make, spec, self._shared)) for spec in specs]
            for actor, process in zip(self._actors, self._processes(), strict=True):
                actor.process = process
            self.descriptions = self._descriptions()
        except BaseException as error:
            self.close()
            if isinstance(error, ActorsLost):
                raise UsageError(f"actors: {error}") from error
            raise
        self._has_announced = False

    def begin(self, number: int, states: Sequence[Any]) -> None:
        """Begin with rollout ``number``, of environments in the given states."""
        for actor, state in zip(self._actors, states, strict=True):
            actor.next, actor.after = number, as_arrays(state)

    def collect(
        self, number: int, weights: dict[str, Any]
    ) -> tuple[list[Any], list[Any], float | None]:
        """The rollouts ``number``, one per actor, which are collected with the latest weights.

        Args:
            number: number of the round, one more than in the call before.
            weights: weights and moments after update ``number - 1``.

        Returns:
            the rollouts and the states after them, see ``Shard.collect``; and the mean number of
            updates by which their weights were behind, None without a lag: then all rounds are
            collected with the weights that learn.

        Raises:
            ActorsLost: an actor or the head node cannot be reached any more, or the same rollout
                ended its process again and again.
            UsageError: an actor met a mistake in the input.
        """
        while not self.cluster.check():
            self._check()
            time.sleep(POLL_SECONDS)
        arrays = as_arrays(weights)
        version, reference = number - 1, self.ray.put(arrays)
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
            self._check()
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
            size = sum(size_of((one.rollout, one.after)) for one in deliveries)
            notice(
                f"ray: the rollout of an environment has {size // self._environments:,} bytes, "
                f"and the weights after an update have {size_of(arrays):,} bytes"
            )
        lag = fmean(version - one.version for one in deliveries) if self.lag else None
        rollouts = [as_tensors(one.rollout) for one in deliveries]
        return rollouts, [as_tensors(one.after) for one in deliveries], lag

    def close(self) -> None:
        """End the actors and leave the cluster."""
        for actor in self._actors:
            self.ray.kill(actor.handle)
        self.cluster.close()

    # --- rollouts -----------------------------------------------------------------------------

    def _dispatch(self, actor: _Remote, version: int, weights: Any) -> None:
        """Let an idle actor begin its next rollout, if the weights are new enough for it."""
        due = actor.next <= self.last and actor.next - 1 - version <= self.lag
        if actor.call is None and due:
            actor.call = actor.handle.collect.remote(actor.next, version, weights, actor.after)
            actor.next += 1

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
                actor.call = actor.handle.collect.remote(number, version, weights, actor.after)
                return
            raise ActorsLost(
                f"{self._name(actor)} was lost {MAX_REPEATS + 1} times in rollout {number} "
                f"({first_line(error)[:LONGEST_REASON]})"
            ) from error
        old, new = actor.process, delivery.process
        if old is not None and new != old:
            notice(
                f"ray: {self._name(actor)} was lost (process {old.number} on {old.host}) and "
                f"started again (process {new.number} on {new.host}); rollout {number} was "
                "collected again"
            )
        actor.process, actor.after, actor.call = new, delivery.after, None
        actor.pending_ping = None
        actor.deliveries.append(delivery)

    def _name(self, actor: _Remote) -> str:
        return f"actor {self._actors.index(actor) + 1} of {len(self._actors)}"

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
                actor.pending_ping = self._ping(actor), time.monotonic()

    @staticmethod
    def _ping(actor: _Remote) -> Any:
        return actor.handle.process.options(concurrency_group="pings").remote()

    # --- the start ----------------------------------------------------------------------------

    def _processes(self) -> list[ActorProcess]:
        """The processes of the actors, once all have started."""
        pings = [self._ping(actor) for actor in self._actors]
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
