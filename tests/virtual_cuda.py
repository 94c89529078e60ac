"""What ``torch.cuda`` offers on a virtual device: streams, events, graphs, memory figures.

See ``virtual_device``. Every function here stands in for the function of the same name in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from virtual_machine import Machine

NAME = "Virtual GPU"


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts; ``pytree`` takes most of a virtual step."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


class Stream:
    """An order of work on one device; what was issued is done once the host has waited for it."""

    machine: Machine

    def __init__(self, device: Any = None, priority: int = 0):
        self.device = self.machine.device_of(device)
        self.issued = self.done = 0

    def synchronize(self) -> None:
        self.machine.note_sync("Stream.synchronize")
        self.machine.forbid_in_capture("Stream.synchronize", self.device)
        self.done = self.issued

    def wait_stream(self, other: Stream) -> None:
        """Work issued on this stream from now on begins after what ``other`` has."""

    def wait_event(self, event: Event) -> None:
        """Work issued on this stream from now on begins after the event."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in a stream."""

    machine: Machine

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any):
        self.stream: Stream | None = None
        self.point = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.machine.current_stream()
        self.point = self.stream.issued

    def query(self) -> bool:
        self.machine.forbid_in_other_threads("Event.query")
        return self.stream is None or self.stream.done >= self.point

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait; the host does not."""

    def synchronize(self) -> None:
        self.machine.note_sync("Event.synchronize")
        self.machine.forbid_in_capture("Event.synchronize", None)
        self.machine.forbid_in_other_threads("Event.synchronize")
        if self.stream is not None:
            self.stream.done = max(self.stream.done, self.point)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class CUDAGraph:
    """The calls that were captured, with their arguments and outputs."""

    machine: Machine

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[Call] = []
        self.device: torch.device | None = None
        self.replays = 0
        self.generators: list[Any] = []

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        machine = self.machine
        assert self.device is not None, "nothing was captured"
        machine.forbid_in_capture("replay of a graph", self.device)
        self.replays += 1
        machine.note_launch(self.device, "graph")
        with machine.resting(), torch._C._AutoDispatchBelowAutograd():
            for call in self.calls:
                call.again()

    def reset(self) -> None:
        self.calls.clear()


class Call:
    """One operation of a graph.

    A replay computes it again from the same tensors and writes into the same outputs. Numbers from
    the host, and tensors of one number there, are those at the time of the capture.
    """

    def __init__(self, function: Any, args: Any, kwargs: Any, outputs: dict[int, torch.Tensor]):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.outputs = outputs
        # Some kernels of a CPU keep their workspace only where gradients are wanted.
        self.learns = torch.is_grad_enabled()

    def again(self) -> None:
        with torch.set_grad_enabled(self.learns):
            found = self.function(*self.args, **self.kwargs)
        new = [*tensors_in(found)]
        for position, old in self.outputs.items():
            old.copy_(new[position])


class graph:
    """Capture into a ``CUDAGraph``: like CUDA, it computes nothing."""

    machine: Machine

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
        **_: Any,
    ):
        self.graph, self.mode = cuda_graph, capture_error_mode
        # torch makes its stream of captures once, on the device that is current then.
        self.stream = stream or self.machine.default_capture_stream()
        self.entered = ExitStack()

    def __enter__(self) -> None:
        machine = self.machine
        machine.forbid_in_capture("a second capture", None)
        machine.synchronize(self.stream.device)
        self.entered.enter_context(machine.in_stream(self.stream))
        machine.begin_capture(self.graph, self.stream, self.mode)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.machine.end_capture(failed=kind is not None)
        self.entered.close()


class OfAutocast:
    """A function of autocast: that of a virtual device is that of the CPU that computes for it."""

    def __init__(self, real: Any):
        self.real = real

    def __call__(self, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return self.real("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


AUTOCAST = ("autocast", "is_autocast_enabled", "get_autocast_dtype")


def uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """``torch.compile`` without a compiler: what is compiled runs as it is."""
    return function if function is not None else uncompiled


@contextmanager
def patched(machine: Machine) -> Iterator[None]:
    """Within the context ``torch.cuda`` is that of the virtual machine."""
    for kind in (Stream, Event, CUDAGraph, graph):
        kind.machine = machine

    @contextmanager
    def device(where: Any) -> Iterator[None]:
        with machine.in_device(machine.device_of(where)):
            yield

    def properties(where: Any = None) -> Any:
        return SimpleNamespace(
            name=NAME, total_memory=machine.capacity, major=machine.capability[0],
            minor=machine.capability[1], multi_processor_count=1,
        )  # fmt: skip

    def stats(where: Any = None) -> dict[str, int]:
        ledger = machine.ledger(machine.device_of(where))
        return {
            "allocated_bytes.all.current": ledger.current,
            "allocated_bytes.all.peak": ledger.peak,
        }

    def free(where: Any = None) -> tuple[int, int]:
        ledger = machine.ledger(machine.device_of(where))
        return machine.capacity - ledger.current, machine.capacity

    def nothing(*_: Any, **__: Any) -> None:
        return None

    functions = {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": nothing,
        "_lazy_init": nothing, "manual_seed_all": nothing, "device_count": lambda: machine.devices,
        "current_device": lambda: machine.current_device().index, "set_device": machine.set_device,
        "device": device, "get_device_name": lambda where=None: NAME,
        "get_device_capability": lambda where=None: machine.capability,
        "get_device_properties": properties,
        "is_bf16_supported": lambda including_emulation=True: machine.bfloat16, "Stream": Stream,
        "Event": Event, "stream": machine.in_stream, "current_stream": machine.current_stream,
        "synchronize": machine.synchronize, "CUDAGraph": CUDAGraph, "graph": graph,
        "is_current_stream_capturing": machine.is_capturing, "mem_get_info": free,
        "memory_allocated": lambda where=None: stats(where)["allocated_bytes.all.current"],
        "max_memory_allocated": lambda where=None: stats(where)["allocated_bytes.all.peak"],
        "memory_reserved": lambda where=None: stats(where)["allocated_bytes.all.current"],
        "max_memory_reserved": lambda where=None: stats(where)["allocated_bytes.all.peak"],
        "memory_stats": stats, "reset_peak_memory_stats": machine.forget_peak,
        "empty_cache": nothing, "set_sync_debug_mode": nothing,
    }  # fmt: skip
    grouped = torch._C._group_tensors_by_device_and_dtype

    def by_device(lists: Any, with_indices: bool = False) -> Any:
        found: dict[Any, Any] = {}
        for (_, dtype), (parts, indices) in grouped(lists, with_indices).items():
            first = next(x for part in parts for x in part if x is not None)
            found[machine.where(first), dtype] = parts, indices
        return found

    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        for place, name, value in (
            *((torch, name, OfAutocast(getattr(torch, name))) for name in AUTOCAST),
            (torch, "compile", uncompiled),
            (torch.version, "cuda", "0.0"),
            (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
            (torch._C, "_group_tensors_by_device_and_dtype", by_device),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        with contextlib.suppress(AttributeError):
            stack.enter_context(mock.patch.object(torch.amp, "autocast", torch.autocast))
        yield
