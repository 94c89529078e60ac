"""The devices of a virtual machine: streams, memory, and what was seen; see ``virtual_device``."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from virtual_cuda import CUDAGraph, Stream

SOURCE = str(Path(__file__).parent.parent / "src" / "esper")
CPU = torch.device("cpu")
CARRIERS = {"wait", "on_host", "states_on_host", "moved", "moved_together"}
"""Functions of ``kasmina.transfer`` and ``kasmina.seeds`` that copy for others."""


class Fault(Exception):
    """What CUDA would refuse, or compute wrongly."""


@dataclass(slots=True)
class Ledger:
    """Bytes allocated on a device."""

    current: int = 0
    peak: int = 0


class Allocation:
    """What a storage on a device carries; its death frees the bytes."""

    __slots__ = ("bytes", "device", "ledger")

    def __init__(self, device: torch.device, size: int, ledger: Ledger):
        self.device, self.bytes, self.ledger = device, size, ledger
        ledger.current += size
        ledger.peak = max(ledger.peak, ledger.current)

    def __del__(self) -> None:
        self.ledger.current -= self.bytes


@dataclass(slots=True)
class Capture:
    """A capture in progress."""

    graph: CUDAGraph
    stream: Stream
    mode: str
    thread: int
    own: set[int] = field(default_factory=set)
    before: dict[int, tuple[Any, Any]] = field(default_factory=dict)


class _Thread(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[torch.device, Stream] = {}
        self.target: torch.device | None = None
        self.resting = 0


class Machine:
    """The devices, and what was seen of them.

    Args:
        devices: number of devices.
        capacity: bytes of memory of each.
        bfloat16: whether they compute in bfloat16.

    Attributes:
        syncs: times that the host waited, by thread, operation and place.
        pageable: copies between a device and pageable memory, likewise.
        launches: operations that launch a kernel, by name; a replay is one.
        faults: messages of all faults, whether or not somebody caught the exception.
        graphs: all graphs that were captured.
    """

    def __init__(self, devices: int, capacity: int, bfloat16: bool):
        self.devices, self.capacity, self.bfloat16 = devices, capacity, bfloat16
        self.capability = (9, 0) if bfloat16 else (7, 0)
        self.syncs: Counter[tuple[str, str, str]] = Counter()
        self.pageable: Counter[tuple[str, str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.faults: list[str] = []
        self.graphs: list[CUDAGraph] = []
        self.capture: Capture | None = None
        self.thread = _Thread()
        self._ledgers = {torch.device("cuda", i): Ledger() for i in range(devices)}
        self._default: dict[torch.device, Stream] = {}
        self._capture_stream: Stream | None = None

    # --- devices, streams, memory ------------------------------------------------------------

    def device_of(self, where: Any) -> torch.device:
        """``where`` as a device with an index."""
        if where is None or where == "cuda":
            return self.current_device()
        found = torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
        if found.type != "cuda":
            return found
        index = self.thread.device if found.index is None else found.index
        if index >= self.devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def current_device(self) -> torch.device:
        return torch.device("cuda", self.thread.device)

    def set_device(self, where: Any) -> None:
        self.thread.device = self.device_of(where).index

    @contextmanager
    def in_device(self, device: torch.device) -> Iterator[None]:
        before, self.thread.device = self.thread.device, device.index
        try:
            yield
        finally:
            self.thread.device = before

    def current_stream(self, where: Any = None) -> Stream:
        device = self.device_of(where)
        if device not in self._default:
            self._default[device] = Stream(device)
        return self.thread.streams.get(device, self._default[device])

    @contextmanager
    def in_stream(self, stream: Stream) -> Iterator[None]:
        before = self.thread.streams
        self.thread.streams = before | {stream.device: stream}
        try:
            with self.in_device(stream.device):
                yield
        finally:
            self.thread.streams = before

    def default_capture_stream(self) -> Stream:
        if self._capture_stream is None:
            self._capture_stream = Stream()
        return self._capture_stream

    def synchronize(self, where: Any = None) -> None:
        device = self.device_of(where)
        self.note_sync("synchronize")
        self.forbid_in_capture("synchronize", device)
        self.current_stream(device).done = self.current_stream(device).issued
        default = self._default[device]
        default.done = default.issued

    def ledger(self, device: torch.device) -> Ledger:
        return self._ledgers[device]

    def forget_peak(self, where: Any = None) -> None:
        ledger = self.ledger(self.device_of(where))
        ledger.peak = ledger.current

    def where(self, x: Tensor) -> torch.device:
        """The device of a tensor."""
        held = getattr(x.untyped_storage(), "held", None)
        return CPU if held is None else held.device

    def put(self, x: Tensor, device: torch.device) -> Tensor:
        """Say that the storage of ``x``, which nobody else has, is on ``device``."""
        storage = x.untyped_storage()
        if device.type == "cpu":
            if hasattr(storage, "held"):
                storage.held = None  # type: ignore[attr-defined]
            return x
        ledger, size = self.ledger(device), storage.nbytes()
        if ledger.current + size > self.capacity:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. {device} has a "
                f"total capacity of {self.capacity / 2**20:.2f} MiB"
            )
        storage.held = Allocation(device, size, ledger)  # type: ignore[attr-defined]
        return x

    # --- what is seen ------------------------------------------------------------------------

    def fault(self, text: str) -> None:
        message = f"{text} ({place()})"
        self.faults.append(message)
        raise Fault(message)

    def note_sync(self, what: str) -> None:
        self.syncs[threading.current_thread().name, what, place()] += 1

    def note_launch(self, device: torch.device, name: str) -> None:
        self.launches[name] += 1
        self.current_stream(device).issued += 1

    def wait(self, what: str, device: torch.device) -> None:
        """The host waits for the current stream of a device."""
        self.forbid_in_capture(what, device)
        self.note_sync(what)
        stream = self.current_stream(device)
        stream.done = stream.issued

    def transfer(self, x: Tensor, target: torch.device, non_blocking: bool, what: str) -> None:
        """Note the copy of ``x`` to ``target``; one of the two is a device."""
        source = self.where(x)
        device = target if source.type == "cpu" else source
        if source.type == target.type:  # the host does not wait for a copy between two devices
            self.forbid_in_capture(what, device)
            self.note_launch(device, what)
            return
        storage = x.untyped_storage()
        pinned = source.type == "cuda" or getattr(storage, "pinned", False)
        # torch puts an asynchronous copy to the host into page-locked memory.
        if not pinned or (target.type == "cpu" and not non_blocking):
            self.pageable[threading.current_thread().name, what, place()] += 1
            if self.is_capturing():
                self.fault(f"{what}: a copy between {device} and pageable memory in a capture")
        if not non_blocking:
            self.wait(what, device)
        self.note_launch(device, what)
        stream = self.current_stream(device)
        if non_blocking and pinned and source.type == "cpu":
            storage.read_by = (stream, stream.issued)  # type: ignore[attr-defined]

    # --- captures ----------------------------------------------------------------------------

    def is_capturing(self) -> bool:
        """Whether this thread captures."""
        return self.capture is not None and self.capture.thread == threading.get_ident()

    def forbid_in_capture(self, what: str, device: torch.device | None) -> None:
        if self.is_capturing():
            self.fault(f"{what} in a capture")

    def forbid_in_other_threads(self, what: str) -> None:
        capture = self.capture
        if capture is not None and capture.mode == "global" and not self.is_capturing():
            self.fault(f"{what} in another thread during a capture in the mode 'global'")

    def begin_capture(self, graph: CUDAGraph, stream: Stream, mode: str) -> None:
        graph.device = stream.device
        self.capture = Capture(graph, stream, mode, threading.get_ident())
        self.graphs.append(graph)

    def end_capture(self, failed: bool) -> None:
        capture, self.capture = self.capture, None
        assert capture is not None
        with self.resting(), torch.no_grad():
            # A capture computes nothing: what it wrote is undone, what it made holds no numbers.
            for storage, content in capture.before.values():
                storage.copy_(content)
            for call in capture.graph.calls:
                for x in call.outputs.values():
                    if x.is_floating_point():
                        x.fill_(float("nan"))
        if not failed and not capture.graph.calls:
            self.faults.append(f"an empty graph was captured on {capture.stream.device}")

    @contextmanager
    def resting(self) -> Iterator[None]:
        """A context in which nothing is checked or counted."""
        self.thread.resting += 1
        try:
            yield
        finally:
            self.thread.resting -= 1

    def mark_coming(self, x: Tensor, source: torch.device) -> None:
        """An asynchronous copy from a device writes into ``x``."""
        stream = self.current_stream(source)
        x.untyped_storage().coming = (stream, stream.issued)  # type: ignore[attr-defined]

    def check_arrived(self, x: Tensor) -> None:
        """``x`` is read: a copy into it must have arrived."""
        coming = getattr(x.untyped_storage(), "coming", None)
        if coming is not None and coming[0].done < coming[1]:
            self.fault("the result of an asynchronous copy was read before it arrived")

    def check_read(self, x: Tensor) -> None:
        """``x`` is written: a copy from it must have been carried out."""
        by = getattr(x.untyped_storage(), "read_by", None)
        if by is not None and by[0].done < by[1]:
            self.fault("page-locked memory was overwritten while a copy reads it")


def place() -> str:
    """The innermost running function of Esper, as file and function, that asked for something.

    Functions that only carry a copy out are left out: what matters is who waits for it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE) and frame.f_code.co_name not in CARRIERS:
            return f"{name[len(SOURCE) + 1 :]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside Esper"
