"""The one line with which a run ends for which a CUDA device has too little memory."""

import re

import torch

from esper.leyline.errors import UsageError
from esper.tolaria.device_memory import SHARE

_REQUEST = re.compile(r"Tried to allocate ([0-9.]+) (MiB|GiB|KiB|bytes)")
_UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def memory_error(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The out-of-memory error that ``error`` is or was caused by, None if there is none."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error


def what_fits(
    error: torch.OutOfMemoryError, count: int, device: torch.device, setting: str = "envs"
) -> UsageError:
    """The error to report: what was needed, what there is, and about how many fit.

    Nearly all memory is taken in proportion to the environments, or to the episodes of a batch, so
    their number is scaled by the ratio of the memory that there is to that which was needed.

    Args:
        error: the error of torch.
        count: environments of the run, or what ``setting`` counts.
        device: device of the policy.
        setting: the setting that says how many there are.
    """
    found = _REQUEST.search(str(error))
    requested = float(found[1]) * _UNITS[found[2]] if found else 0.0
    needed = torch.cuda.max_memory_allocated(device) + requested
    available = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    fits = min(count - 1, int(count * SHARE * available / max(needed, 1.0)))
    advice = f"about {fits} fit" if fits > 0 else "not even one fits"
    return UsageError(
        f"{setting}: {count} do not fit into the memory of {device}: "
        f"at least {needed / 2**30:.2f} GiB are needed and {available / 2**30:.2f} GiB available; "
        f"{advice}"
    )
