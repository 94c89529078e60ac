"""The policy's update and rollout, captured and not, beside sb3-contrib's where it is installed."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from gym_engine import CPU, ENVS, STEPS, Ours
from hot_path_workload import wait_for
from reporting import in_turns

from gpu_checks.place import HALVES, TF32, Place, Row, computing
from gpu_checks.section import Found, rows_table

WARMUPS = 5
"""Updates before the timed ones; a graph is captured in the fourth."""
KERNELS: dict[str, dict[str, Any]] = {
    "Adam, fused": {"fused": True},
    "Adam, foreach": {"foreach": True},
    "Adam, single tensors": {"foreach": False, "fused": False},
}
"""A step of the optimizer by each implementation in torch."""


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per engine and call; the calls take turns."""
    half = place.halves[0]
    with computing(TF32):
        ours = {
            "esper, captured": Ours(None, place.device, captured=True),
            "esper": Ours(None, place.device),
            f"esper {half}, captured": Ours(HALVES[half], place.device, captured=True),
        }
        calls: dict[str, Callable[[], object]] = {}
        for name, engine in ours.items():
            for _ in range(WARMUPS):
                engine.update()
            calls[f"{name}: update"] = engine.update
            if place.machine is None:
                calls[f"{name}: rollout"] = engine.collect
        if place.machine is None and find_spec("sb3_contrib") is not None:
            theirs = import_module("gym_speed").Theirs(device=place.device)
            calls |= {"sb3-contrib: update": theirs.update, "sb3-contrib: rollout": theirs.collect}

        def finish(call: Callable[[], object]) -> None:
            call()
            wait_for(place.device)

        waiting = {name: partial(finish, call) for name, call in calls.items()}
        times = in_turns(waiting, place.size(9, 1))
    for name, (wall, cpu) in times.items():
        who, what = name.split(": ")
        other = times.get(f"sb3-contrib: {what}")
        yield {
            "who": who,
            "what": what,
            "ms": 1e3 * wall,
            "CPU, ms": 1e3 * cpu,
            "steps a second": STEPS * ENVS / wall,
            "times as fast as sb3-contrib": None if other is None else other[0] / wall,
        }
    yield from optimizer_steps(place, ours["esper"])
    if place.machine is None:
        with computing(TF32):
            on_cpu = in_turns({"update": Ours(None, CPU).update}, 3)
        yield {"who": "esper on one CPU core", "what": "update", "ms": 1e3 * on_cpu["update"][0]}


def optimizer_steps(place: Place, engine: Ours) -> Iterator[Row]:
    """Yield a row per implementation of Adam: a step on copies of the policy's parameters."""
    for who, kernels in KERNELS.items():
        copies = [torch.zeros_like(p).requires_grad_() for p in engine.agent.policy.parameters()]
        for parameter in copies:
            parameter.grad = torch.ones_like(parameter)
        adam = torch.optim.Adam(copies, capturable=True, **kernels)
        yield {"who": who, "what": "step", "ms": 1e3 * place.seconds(adam.step)}


def page(rows: list[Row], found: Found) -> str:
    """Return the calls in Markdown."""
    names = ("who", "what", "ms", "CPU, ms", "steps a second", "times as fast as sb3-contrib")
    return rows_table(names, rows)
