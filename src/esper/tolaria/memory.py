"""Memory: settings of the C allocator, peaks, and how many rows a CUDA device trains at a time.

A pass keeps the activations of all its rows until the backward pass. Rows that do not fit together
are trained one part after another, which takes more launches but the same memory for any number of
rows.
"""

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from esper.kasmina.hosts.host import Host
from esper.leyline.actions import Style
from esper.leyline.errors import UsageError
from esper.tolaria.backends.choice import run_once, torch_backend
from esper.tolaria.plan import Seeds, Variant
from esper.tolaria.precision import Precision

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


SHARE = 0.8
"""Part of the free memory that hosts may take; the rest is for the policy's update, the workspace
of libraries and fragmentation."""

_ROWS = 2, 6
"""Rows of the two trials, whose difference is what a row takes."""
_ALPHA = 0.5


@dataclass(frozen=True, slots=True)
class RowMemory:
    """What a row takes at most, in bytes.

    Attributes:
        active: in a pass of training or validation, with the largest seed in every slot.
        stored: always: parameters, optimizer state and the snapshot of the governor.
    """

    active: float
    stored: float


def row_memory(
    host: Host, precision: Precision, dtype: torch.dtype, device: torch.device, batch_size: int
) -> RowMemory:
    """Measure a row of ``host`` on a CUDA device, in minibatches of ``batch_size`` images."""
    kinds = [max(slot.kinds, key=lambda kind: slot.layouts[kind].size) for slot in host.slots]
    evaluation_batch = torch_backend(host, precision).evaluation_batch

    def peak(rows: int) -> int:
        """Most bytes above those now allocated in a minibatch of training and of validation."""
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        blueprint = torch.tensor(kinds, device=device).expand(rows, -1)
        everywhere = torch.ones_like(blueprint, dtype=torch.bool)
        style = torch.full_like(blueprint, Style.GATED_GATE)
        alpha = torch.full(blueprint.shape, _ALPHA, device=device)
        seeds = Seeds(everywhere, blueprint, style, alpha, ~everywhere)
        everyone = torch.arange(rows, device=device)
        variants = [
            Variant(s, everyone, alpha.index_fill(1, torch.tensor([s], device=device), 0.0))
            for s in range(len(host.slots))
        ]
        run_once(host, precision, seeds, dtype, batch_size, evaluation_batch, variants)
        return torch.cuda.max_memory_allocated(device) - before

    # The first call allocates what libraries keep, such as the workspace of cuBLAS.
    _, least, most = (peak(rows) for rows in (_ROWS[0], *_ROWS))
    active = max(1.0, (most - least) / (_ROWS[1] - _ROWS[0]))
    return RowMemory(active, stored_bytes(host, dtype))


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that this process may still take."""
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0] + reserve
    return free


def rows_at_a_time(memory: RowMemory, rows: int, device: torch.device) -> int:
    """The most rows in one pass while ``rows`` are stored; 0 or less if they cannot be stored."""
    return int((SHARE * free_bytes(device) - rows * memory.stored) // memory.active)


def parts_within(most: int, groups: Sequence[int], device: torch.device) -> int:
    """Into how many parts of whole groups rows are cut, a power of two.

    With fixed steps the cut, and with it the last bits, seldom depends on what else a GPU computes.

    Args:
        most: the most rows of a part.
        groups: environments of each group, which has one twin.
        device: named in the error.

    Raises:
        UsageError: a group alone has too many rows.
    """
    largest = max(groups) + 1
    if largest > most:
        fits = f"--group-size {most - 1} fits" if most > 1 else "no host fits"
        raise UsageError(
            f"group_size: a group of {largest - 1} environments and its twin do not fit into the "
            f"{free_bytes(device) / 2**30:.1f} GiB that are free on {device}; {fits}"
        )
    parts, rows = 1, sum(groups) + len(groups)
    # A part holds whole groups, so it may have almost one group more than the mean.
    while rows > most and -(-rows // parts) + largest > most and parts < len(groups):
        parts *= 2
    return min(parts, len(groups))
