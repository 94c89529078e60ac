"""Where does the host wait for the device? Lists every place in a step and in an update.

    python scripts/profile_gpu_sync.py
    python scripts/profile_gpu_sync.py --device cuda:0

On CUDA, torch itself reports each synchronisation (sync debug mode). On a CPU nothing waits, but
the operations that would wait (reading a number from a tensor, a shape that depends on values) are
still dispatched, so they are counted there. Runs the torch backend, which is the one for CUDA.
The exit status is 1 if there is a place outside ``DOCUMENTED``.
"""

import argparse
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from hot_path_workload import Loop, Workload

SOURCE = Path(__file__).parent.parent / "src"

DOCUMENTED = {
    "tolaria/plan.py:plan": "which seeds live where decides what is launched; once a slot",
    "tolaria/plan.py:_slot_plan": "which seeds live where decides what is launched; once a slot",
    "tolaria/engine.py:germinate": "rows of newborn seeds; once a slot",
    "tolaria/engine.py:_ablations": "rows that have a seed to leave out; once a slot",
    "tolaria/coalitions.py:grouped_by_first_change": "as _ablations; in the last steps alone",
    "tolaria/coalitions.py:filled": "the coalitions' table; in the last step alone",
    "tolaria/coalitions.py:shapley": "sizes of coalitions, a constant; in the last step alone",
    "tolaria/coalitions.py:interactions": "as shapley",
    "tolaria/backends/store_rows.py:__init__": "whether any seed of a slot is frozen; once a slot",
    "simic/growth/step_functions.py:act": "whether seeds are born or must be kept; once a step",
    "simic/growth/shard.py:_live": "whether any host was rolled back; once a step",
    "simic/growth/shard.py:_restore": "rows that were rolled back; only then",
    "simic/training/step_events.py:take": "telemetry: all of a step in a few transfers",
    "simic/training/decisions.py:record": "telemetry: what was decided, in two transfers",
    "simic/growth/environment.py:current_tasks": "telemetry: which tasks a round trains",
    "simic/training/recorder.py:_emit_rollbacks": "telemetry: which hosts were rolled back",
    "simic/training/recorder.py:finish": "telemetry: the outcome of a round",
    "simic/training/recorder.py:_listed": "telemetry: the outcome of a round",
    "simic/training/recorder.py:mean": "telemetry: the summary of a round",
    "simic/update_metrics.py:summarise": "the one transfer of an update: what happened in it",
    "simic/growth/environment.py:reset": "whether the tasks were dealt anew; once an episode",
}
"""Places that may wait, and why; see docs/performance.md."""

WAITING = {
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_consecutive",
    "aten.unique_dim",
    "aten.equal",
    "aten.repeat_interleave",
}
"""Operations whose result the host must read."""


def place() -> str:
    """Return the innermost running function of Esper as file, function and line."""
    for frame in reversed(traceback.extract_stack()):
        if str(SOURCE) in frame.filename and "site-packages" not in frame.filename:
            file = Path(frame.filename).relative_to(SOURCE / "esper")
            if frame.name.startswith("<"):
                continue
            return f"{file}:{frame.name}:{frame.lineno}"
    return "outside Esper"


class Dispatched(TorchDispatchMode):
    """Counts operations that would wait on a device, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function.overloadpacket)
        indexed = name == "aten.index" and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name in WAITING or indexed:
            self.found[place()] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def caught_on_cpu(found: Counter[str]) -> Iterator[None]:
    """Count operations that would wait, including ``tolist``, which is not dispatched."""
    original = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        # The telemetry thread reads only tensors that are already on the host.
        if threading.current_thread() is threading.main_thread():
            found[place()] += 1
        return original(tensor)

    mode = Dispatched()
    with mock.patch.object(torch.Tensor, "tolist", tolist), mode:
        yield
    found.update(mode.found)


@contextmanager
def caught_on_cuda(found: Counter[str]) -> Iterator[None]:
    """Count the synchronisations that torch warns of."""

    def note(*_: object, **__: object) -> None:
        found[place()] += 1

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with mock.patch.object(warnings, "showwarning", note):
                yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def report(title: str, found: Counter[str], calls: int) -> bool:
    """Print the places; return whether all of them are documented."""
    print(f"\n{title}: {sum(found.values()) / calls:.1f} a call")
    fine = True
    for where, count in sorted(found.items(), key=lambda pair: -pair[1]):
        reason = DOCUMENTED.get(where.rpartition(":")[0])
        fine &= reason is not None
        print(f"  {count / calls:6.2f}  {where:58}  {reason or 'NOT DOCUMENTED'}")
    return fine


def main() -> int:
    """Print all synchronisations; return 1 if one is not documented."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    workload = Workload(
        task=arguments.task,
        envs=arguments.envs,
        episode_length=12,
        max_batches=2,
        device=arguments.device,
        threads=1,
    )
    catch = caught_on_cuda if arguments.device.startswith("cuda") else caught_on_cpu
    torch.set_num_threads(1)
    loop = Loop(workload, "torch")
    loop.begin()
    loop.play_episode()  # the first episode also does one-time work
    steps: Counter[str] = Counter()
    update: Counter[str] = Counter()
    loop.begin()
    for _ in range(workload.episode_length):
        with catch(steps):
            loop.step()
    with catch(update):
        loop.end()
    loop.close()
    fine = report("a step", steps, workload.episode_length)
    fine &= report("an update, and the outcome of its round", update, 1)
    if not fine:
        print("\nthere are undocumented synchronisations", file=sys.stderr)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
