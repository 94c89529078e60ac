"""Where does the host wait for the device? Lists every place in a step and in an update.

    python scripts/profile_gpu_sync.py
    python scripts/profile_gpu_sync.py --device cuda:0

On CUDA, torch itself reports each synchronisation (sync debug mode) but the waits for events, which
are counted beside them. Without, the loop runs on a virtual device (``tests/virtual_device.py``),
where nothing waits but everything that would is seen, and so is every launch. The exit status is 1
if there is a place outside ``DOCUMENTED``.
"""

import argparse
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from esper.simic.training.setup import arithmetic

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from hot_path_workload import Loop, Workload, described

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from virtual_device import Machine, virtual_device

SOURCE = Path(__file__).parent.parent / "src"

DOCUMENTED = {
    "tamiyo/step_functions.py:act": "which seeds live where decides what is launched",
    "simic/growth/shard.py:_run_epoch": "whether any host was rolled back; once a step",
    "simic/growth/shard.py:_restore": "rows that were rolled back; only then",
    "tolaria/backends/__init__.py:__iter__": "streamed images: which of them an epoch draws",
    "simic/update_metrics.py:summarise": "the one transfer of an update: what happened in it",
    "simic/training/recorder.py:finish": "the outcome of a round, once",
}
"""Places that may wait, and why; see docs/performance.md."""

CARRIERS = {"wait", "on_host", "states_on_host"}
"""Functions that copy for others."""


def place() -> str:
    """Return the innermost running function of Esper that asked for something."""
    for frame in reversed(traceback.extract_stack()):
        if str(SOURCE) in frame.filename and frame.name not in CARRIERS:
            return f"{Path(frame.filename).relative_to(SOURCE / 'esper')}:{frame.name}"
    return "outside Esper"


@contextmanager
def caught_on_cuda(found: Counter[str]) -> Iterator[None]:
    """Count the synchronisations that torch warns of, and waits of this thread for events."""
    main, wait = threading.current_thread(), torch.cuda.Event.synchronize

    def note(*_: object, **__: object) -> None:
        found[place()] += 1

    def noted(event: torch.cuda.Event) -> None:
        if threading.current_thread() is main:
            note()
        wait(event)

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with (
                mock.patch.object(warnings, "showwarning", note),
                mock.patch.object(torch.cuda.Event, "synchronize", noted),
            ):
                yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def caught_on(machine: Machine, found: Counter[str]) -> Iterator[None]:
    """Count the waits on a virtual device of all threads but that of the telemetry."""
    before = Counter(machine.syncs)
    yield
    for (thread, _, where), count in (machine.syncs - before).items():
        if thread != "nissa":
            found[where] += count


@dataclass(frozen=True)
class Waits:
    """The waits of a training loop.

    Attributes:
        steps: waits of all steps by place.
        update: waits of an update and of the outcome of its round.
        length: number of steps.
        launches: launches a step; None where they are not counted.
        loop: the machine and the settings.
    """

    steps: Counter[str]
    update: Counter[str]
    length: int
    launches: float | None
    loop: str

    @property
    def undocumented(self) -> set[str]:
        """Places that wait and are not in ``DOCUMENTED``."""
        return (self.steps.keys() | self.update.keys()) - DOCUMENTED.keys()


def report(title: str, found: Counter[str], calls: int) -> None:
    """Print the places."""
    print(f"\n{title}: {sum(found.values()) / calls:.1f} a call")
    for where, count in sorted(found.items(), key=lambda pair: -pair[1]):
        reason = DOCUMENTED.get(where, "NOT DOCUMENTED")
        print(f"  {count / calls:6.2f}  {where:58}  {reason}")


def main() -> int:
    """Print all synchronisations; return 1 if one is not documented."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--device", default="virtual", help="virtual, or cuda:0 and so on")
    parser.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=True, help="as in training"
    )
    arguments = parser.parse_args()
    given = arguments.task, arguments.envs
    with arithmetic(torch.device("cuda"), 1, arguments.tf32):
        if arguments.device != "virtual":
            found = profiled(*given, arguments.device)
        else:
            with virtual_device() as machine:
                found = profiled(*given, "cuda:0", machine)
    print(found.loop)
    if found.launches is not None:
        print(f"virtual device; {found.launches:.0f} launches a step")
    report("a step", found.steps, found.length)
    report("an update, and the outcome of its round", found.update, 1)
    if found.undocumented:
        print("\nthere are undocumented synchronisations", file=sys.stderr)
    return 1 if found.undocumented else 0


def profiled(task: str, envs: int, device: str, machine: Machine | None = None) -> Waits:
    """Return the waits of a loop on a CUDA device, or on a virtual machine's."""
    catch: Callable[[Counter[str]], AbstractContextManager[None]]
    catch = caught_on_cuda if machine is None else partial(caught_on, machine)
    workload = Workload(
        task=task,
        envs=envs,
        episode_length=12,
        max_batches=2,
        device=device,
        threads=1,
        synchronised=False,
    )
    torch.set_num_threads(1)
    loop = Loop(workload, "torch")
    loop.begin()
    loop.play_episode()  # the first episode also does one-time work
    steps: Counter[str] = Counter()
    update: Counter[str] = Counter()
    loop.begin()
    if machine is not None:
        machine.launches.clear()
    for _ in range(workload.episode_length):
        with catch(steps):
            loop.step()
    length = workload.episode_length
    launches = None if machine is None else sum(machine.launches.values()) / length
    with catch(update):
        loop.end()
    loop.close()
    return Waits(steps, update, length, launches, described(torch.device(device), workload))


if __name__ == "__main__":
    raise SystemExit(main())
