"""C allocator settings for the large temporaries of a training step, and peak memory."""

import ctypes
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from esper.kasmina.hosts.host import Host

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEEP_BYTES = 1 << 30
_PAD_BYTES = 256 << 20


@cache
def keep_memory() -> bool:
    """Make glibc reuse large blocks instead of returning them to the system; runs once per process.

    Without it glibc maps, faults in and unmaps every activation in each minibatch, which costs
    more than the arithmetic. Returns False where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEEP_BYTES), (_M_TOP_PAD, _PAD_BYTES))
    return all([mallopt(option, value) == 1 for option, value in settings])


def forget_peak() -> None:
    """Reset the peak that ``peak_resident`` reports, on systems that support it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int | None:
    """Peak resident memory of this process in bytes; None where the system does not report it."""
    # Not ru_maxrss: a child process inherits the value of its parent.
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    return None


def stored_bytes(host: Host, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that a host takes as long as it lives, on any device.

    These are its parameters and those of its seeds with two moments and the snapshot of the
    governor, and its running statistics with their snapshot.
    """
    parameters = host.layout.size + sum(slot.width for slot in host.slots)
    return (4 * parameters + 2 * host.buffers.size) * dtype.itemsize
