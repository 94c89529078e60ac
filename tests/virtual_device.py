"""A virtual CUDA machine on a CPU: shows what a GPU would refuse, wait for or launch.

Within ``virtual_device()`` tensors may be put on ``cuda:K``. They stay in CPU memory; their storage
carries the device. Every operation of torch is checked and counted, those of backward passes
included:

- tensors of different devices in one operation raise ``Fault``, with torch's exceptions: a CPU
  tensor of one number takes part in elementwise operations, and indices may be on the CPU;
- whatever makes the host wait for the device is logged with the place in Esper that did it, and so
  is every copy from or to pageable memory;
- the result of an asynchronous copy may not be read before its stream was waited for, and the
  source of one may not be overwritten before that;
- a capture raises ``Fault`` where CUDA would end it, computes nothing, and is replayed by computing
  the recorded operations again into the same tensors;
- allocated bytes are counted by device, and more than the capacity raises ``OutOfMemoryError``.

What it cannot show: whether a kernel exists, how it rounds, races between streams, and time.
Composite operations are counted as the CPU carries them out: an LSTM is one launch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # it looks through torch.cuda once, which must be the real one

from virtual_cuda import patched
from virtual_functions import Functions
from virtual_machine import Fault, Machine
from virtual_operations import Operations

__all__ = ["Fault", "Machine", "virtual_device"]


@contextmanager
def active(machine: Machine) -> Iterator[None]:
    """A context in which this thread's operations are those of the machine."""
    with Functions(machine), Operations(machine):
        yield


@contextmanager
def virtual_device(
    devices: int = 1, capacity: int = 80 << 30, bfloat16: bool = True
) -> Iterator[Machine]:
    """A machine with virtual CUDA devices, for this thread and those that it starts."""
    machine = Machine(devices, capacity, bfloat16)
    run, backward = threading.Thread.run, torch.autograd._engine_run_backward

    def run_inside(thread: threading.Thread) -> None:
        with active(machine):
            run(thread)

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # torch suspends a mode while it handles a function: hooks would see no devices.
        machine.thread.target = None
        if torch._C._len_torch_function_stack():
            return backward(*args, **kwargs)
        with Functions(machine):
            return backward(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patched(machine))
        for place, name, value in (
            (threading.Thread, "run", run_inside),
            (torch.autograd, "_engine_run_backward", run_backward),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(active(machine))
        yield machine
