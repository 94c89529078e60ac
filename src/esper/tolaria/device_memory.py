"""How many rows a CUDA device can train at a time, from a trial of a training minibatch.

A pass keeps the activations of all its rows until the backward pass. Rows that do not fit together
are trained one part after another, which takes more launches but the same memory for any number of
rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esper.kasmina.hosts.host import Host
from esper.leyline.actions import Style
from esper.leyline.errors import UsageError
from esper.tolaria.backends.choice import torch_backend
from esper.tolaria.backends.trial import run_once
from esper.tolaria.memory import stored_bytes
from esper.tolaria.plan import Seeds, Variant
from esper.tolaria.precision import Precision

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
    least, most = (_peak(host, precision, dtype, device, batch_size, rows) for rows in _ROWS)
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


def _peak(
    host: Host,
    precision: Precision,
    dtype: torch.dtype,
    device: torch.device,
    batch_size: int,
    rows: int,
) -> int:
    """Most bytes above those now allocated in a minibatch of training and one of validation."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seeds = _largest_seeds(host, rows, device)
    everyone = torch.arange(rows, device=device)
    variants = [
        Variant(s, everyone, seeds.alpha.index_fill(1, torch.tensor([s], device=device), 0.0))
        for s in range(len(host.slots))
    ]
    evaluation_batch = torch_backend(host, precision).evaluation_batch
    run_once(host, precision, seeds, dtype, batch_size, evaluation_batch, variants)
    return torch.cuda.max_memory_allocated(device) - before


def _largest_seeds(host: Host, rows: int, device: torch.device) -> Seeds:
    """The seed with the most parameters in every slot of every row, with a gate."""
    kinds = [max(slot.kinds, key=lambda kind: slot.layouts[kind].size) for slot in host.slots]
    blueprint = torch.tensor(kinds, device=device).expand(rows, -1)
    everywhere = torch.ones_like(blueprint, dtype=torch.bool)
    style = torch.full_like(blueprint, Style.GATED_GATE)
    alpha = torch.full(blueprint.shape, _ALPHA, device=device)
    return Seeds(everywhere, blueprint, style, alpha, ~everywhere)
