"""What do a step and an update consist of? Time, operations and Python's share per stage.

    python scripts/profile_hot_path_operations.py
    python scripts/profile_hot_path_operations.py --task digits_mlp --envs 256 --backend torch

Two passes over one episode each: one measures the time, the other the operations that reach torch's
dispatcher and the time spent inside them. The rest of a stage's time is Python's share; it is
unknown where the native library computes. Figures of a stage exclude the stages within it.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.simic import ppo
from esper.simic.gradients import GradientNorms
from esper.simic.growth import shard
from esper.simic.optimizer import PolicyOptimizer
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.simic.training.recorder import Recorder
from esper.simic.training.setup import arithmetic
from esper.tamiyo.step_functions import TorchStep
from esper.tolaria.engine import Engine
from esper.tolaria.governor import Governor

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from hot_path_workload import Loop, Workload, described, wait_for
from reporting import table

Stages = tuple[tuple[object, str, str], ...]

STEP_STAGES: Stages = (
    (Loop, "step", "the rest of a step"),
    (PPOAgent, "act", "policy"),
    (Rollout, "write", "rollout"),
    (TorchStep, "act", "actions"),
    (shard.Shard, "_germinate", "germinate"),
    (Engine, "minibatches", "draw minibatches"),
    (Engine, "train", "train"),
    (Engine, "measure", "validate and ablate"),
    (Engine, "coalitions", "coalitions (last step)"),
    (TorchStep, "check", "governor"),
    (Governor, "snapshot", "snapshots"),
    (shard.Shard, "_advance_lifecycle", "time, signals, gates"),
    (shard.Shard, "_reward", "reward"),
    (shard.Shard, "_observe", "observation"),
    (Recorder, "step", "telemetry"),
)
UPDATE_STAGES: Stages = (
    (Loop, "end", "the rest of an update"),
    (PPOAgent, "_prepare_batch", "advantages and sequences"),
    (PPOAgent, "_backward", "forward and loss"),
    (torch.Tensor, "backward", "backward"),
    (GradientNorms, "measure", "gradient norms"),
    (GradientNorms, "clip", "clipping"),
    (PolicyOptimizer, "step_unless", "optimizer"),
    (PPOAgent, "_update_moments", "normalisers"),
    (ppo, "summarise", "summary"),
    (Recorder, "finish", "telemetry of the round"),
)


class Ledger:
    """Time, calls and operations by stage; a nested stage does not count for its caller.

    Clocks stop when ``device`` has carried out what was launched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stack: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.operations: dict[str, int] = defaultdict(int)
        self.inside: dict[str, float] = defaultdict(float)
        self.since = 0.0

    def enter(self, stage: str) -> None:
        """Start the clock of a stage; that of its caller stops."""
        wait_for(self.device)
        now = time.perf_counter()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.since
        self.stack.append(stage)
        self.calls[stage] += 1
        self.since = time.perf_counter()

    def leave(self) -> None:
        """Stop the clock of the innermost stage; that of its caller continues."""
        wait_for(self.device)
        now = time.perf_counter()
        self.seconds[self.stack.pop()] += now - self.since
        self.since = time.perf_counter()


@contextmanager
def watched(ledger: Ledger) -> Iterator[None]:
    """Make the function of every stage report to the ledger."""

    def reporting(function: Callable[..., object], stage: str) -> Callable[..., object]:
        @wraps(function)
        def reported(*arguments: object, **options: object) -> object:
            ledger.enter(stage)
            try:
                return function(*arguments, **options)
            finally:
                ledger.leave()

        return reported

    stages = STEP_STAGES + UPDATE_STAGES
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in stages]
    for (owner, name, stage), (_, _, function) in zip(stages, before, strict=True):
        setattr(owner, name, reporting(function, stage))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


class Operations(TorchDispatchMode):
    """Counts operations by stage, and the time inside them."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        stage = self.ledger.stack[-1] if self.ledger.stack else ""
        begin = time.perf_counter()
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.ledger.inside[stage] += time.perf_counter() - begin
            self.ledger.operations[stage] += 1


def play(loop: Loop, ledger: Ledger) -> None:
    """Play one episode and its update."""
    loop.begin()
    loop.clear()
    with watched(ledger):
        loop.play_episode()


def page(
    title: str, stages: Stages, timed: Ledger, counted: Ledger, native: bool, calls: int
) -> str:
    """Return a table with one line per stage, longest first; figures are per one of ``calls``."""
    names = dict.fromkeys(stage for _, _, stage in stages if timed.calls[stage])
    total = sum(timed.seconds[name] for name in names)
    library = ("train", "validate and ablate") if native else ()
    rows = []
    for name in sorted(names, key=lambda n: -timed.seconds[n]):
        seconds = timed.seconds[name]
        inside = min(seconds, counted.inside[name])
        rows.append(
            (
                *(name, f"{1e3 * seconds / calls:.2f}", f"{100 * seconds / total:.0f} %"),
                f"{counted.operations[name] / calls:.0f}",
                "-" if name in library else f"{100 * (1 - inside / seconds):.0f} %",
            )
        )
    heads = ("stage", "ms", "share", "operations", "Python")
    return f"\n{title}: {1e3 * total / calls:.2f} ms\n\n{table(heads, rows)}"


def main() -> int:
    """Print the tables of a step and of an update; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--episode-length", type=int, default=40)
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "native"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=True, help="as in training"
    )
    arguments = parser.parse_args()
    if arguments.threads > 1 and arguments.backend == "torch":
        parser.error("--threads: shards of the torch backend run side by side; profile one thread")
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    workload = Workload(
        task=arguments.task,
        envs=arguments.envs,
        episode_length=arguments.episode_length,
        device=arguments.device,
        threads=arguments.threads,
    )
    with arithmetic(device, 1, arguments.tf32):
        loop = Loop(workload, arguments.backend)
        play(loop, Ledger(device))  # warm-up: lookup tables are made on first use
        timed, counted = Ledger(device), Ledger(device)
        play(loop, timed)
        with Operations(counted):
            play(loop, counted)
        print(described(device, workload))
    native = loop.backend_name == "NativeBackend"
    print(f"{workload.task}, {workload.envs} environments, {loop.backend_name}")
    steps = workload.episode_length
    print(page("an environment step", STEP_STAGES, timed, counted, native, steps))
    print(page("an update", UPDATE_STAGES, timed, counted, native, 1))
    loop.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
