"""The device on which a section measures: a GPU, or the virtual one."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import torch
from hot_path_workload import Workload
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as device_clock

from esper.simic.training.setup import arithmetic
from esper.tolaria.precision import Precision
from virtual_device import Machine, virtual_device

T = TypeVar("T")

TINY = {
    "group_size": 4,
    "episode_length": 6,
    "max_batches": 1,
    "batch_size": 4,
    "ppo_epochs": 1,
    "minibatches": 1,
    "lstm_hidden": 16,
}
"""Settings of a whole run on the virtual device."""
Row = dict[str, Any]

TF32, FLOAT32 = "TF32", "float32"
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS = (FLOAT32, TF32, *HALVES)
"""Float32 products in full precision, in TF32 as in training, and mixed precision."""


@dataclass(frozen=True)
class Place:
    """Where a section measures.

    Attributes:
        device: a CUDA device.
        machine: the virtual machine, None on a GPU.
    """

    device: torch.device
    machine: Machine | None

    @property
    def halves(self) -> tuple[str, ...]:
        """The half precisions that the device has."""
        known = torch.cuda.is_bf16_supported(including_emulation=False)
        return tuple(name for name in HALVES if known or name != "bfloat16")

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that the device has."""
        return FLOAT32, TF32, *self.halves

    def size(self, real: T, virtual: T) -> T:
        """Return what is measured on a GPU, or the little that shows that the code runs."""
        return real if self.machine is None else virtual

    def workload(self, envs: int, precision: Precision, steps: int, **settings: Any) -> Workload:
        """Return whole loops of ``envs`` environments in episodes of ``steps`` steps, on a GPU.

        On the virtual device they are tiny; ``settings`` come before both.
        """
        sizes = {
            "episode_length": self.size(steps, 4),
            "max_batches": self.size(None, 1),
            "batch_size": self.size(None, 4),
            "ppo_epochs": self.size(4, 1),
        }
        fixed = {"device": str(self.device), "precision": precision, "threads": 1}
        return Workload(**{"envs": envs, **fixed, **sizes, **settings})

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call until the device has carried it out."""
        # Torch's clock waits for the accelerator of its build, which without a driver is an error.
        clock = self.size(device_clock, perf_counter)
        timer = Timer("call()", timer=clock, globals={"call": call})
        return float(timer.blocked_autorange(min_run_time=self.size(0.2, 0.001)).median)


@contextmanager
def entered(virtual: bool) -> Iterator[Place]:
    """Enter the device: everything within runs on it."""
    torch.set_num_threads(1)
    device = torch.device("cuda:0")
    if not virtual:
        yield Place(device, None)
        return
    with virtual_device() as machine:
        yield Place(device, machine)
    if machine.faults:
        raise RuntimeError("; ".join(machine.faults))


@contextmanager
def computing(precision: str) -> Iterator[Precision]:
    """Compute in one of ``PRECISIONS``; yields the precision of hosts."""
    with arithmetic(torch.device("cuda"), 1, tf32=precision != FLOAT32):
        yield Precision("cuda", HALVES.get(precision))


def attempted(row: Row, measure: Callable[[], Row]) -> Row:
    """Return ``row`` with what is measured, or with why it was not.

    Too little memory is a result; any other error stands in ``error``, and its section has failed.
    """
    # What the row before it held: loops and their graphs refer to themselves.
    gc.collect()
    torch.cuda.empty_cache()
    try:
        return row | measure()
    except torch.OutOfMemoryError as error:
        return row | {"note": f"out of memory: {str(error).splitlines()[0]}"}
    except (Exception, SystemExit):  # benchmarks end with SystemExit
        return row | {"error": traceback.format_exc()}
