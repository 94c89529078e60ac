"""Hosts distributed over several devices give the results of one device."""

import re
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import HEADS
from esper.leyline.config import LearnerConfig, TrainConfig, check, unflatten
from esper.leyline.errors import UsageError
from esper.runtime.data import Augmentation
from esper.runtime.tasks import Task
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv, ShardError
from esper.simic.growth.step import Step
from esper.simic.rollout import Rollout
from esper.simic.training.setup import resolve_devices
from esper.tolaria.precision import Precision
from support import CPU, F64, needs_native, small_environments, small_host, small_task

FULL = Precision("cpu")
AUGMENTED = replace(small_task(small_host()), augmentation=Augmentation(reach=1, flip=True))
WIDER = replace(small_task(small_host(channels=(4, 6))), name="wider")


def growth(
    devices: int, envs: int, tasks: list[Task], precision: Precision = FULL, **settings
) -> GrowthEnv:
    config = {"seed": 7, "episode_length": 10, "one_at_a_time": False, "dtype": F64}
    config |= {"backend": "torch"} | settings
    return small_environments(tasks, envs, precision, [CPU] * devices, **config)


def play(env: GrowthEnv) -> tuple[Rollout, list[Step]]:
    agent = growth_agent(LearnerConfig(lstm_hidden=16), 3, CPU)
    steps: list[Step] = []
    return collect(env, agent, 0, lambda t, actions, step: steps.append(step)), steps


def results(step: Step) -> dict[str, Tensor]:
    parts = {"": step.report, "scores": step.report.scores, "after": step.report.after}
    found = {
        f"{name} {f.name}": getattr(part, f.name)
        for name, part in parts.items()
        for f in fields(part)
    }
    return {"reward": step.reward} | {n: x for n, x in found.items() if isinstance(x, Tensor)}


@pytest.mark.parametrize(
    ("envs", "devices", "tasks"),
    [
        (8, 2, [AUGMENTED]),
        (5, 2, [AUGMENTED, WIDER]),  # three groups, one of them incomplete
        (2, 2, [AUGMENTED]),  # one group, split
        (3, 3, [WIDER]),
        (1, 2, [WIDER]),  # one device without environments
    ],
)
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_several_devices_give_the_results_of_one(
    envs: int, devices: int, tasks: list[Task], backend: str
) -> None:
    (one, steps), (other, dealt) = (
        play(growth(n, envs, tasks, backend=backend)) for n in (1, devices)
    )
    assert torch.equal(one.actions, other.actions)
    tolerance = 0.0 if backend == "native" else 1e-9
    for step, found in zip(steps, dealt, strict=True):
        for name, expected in results(step).items():
            # Signals are stored in float32.
            bound = tolerance if expected.dtype == F64 else min(1.0, tolerance * 1e5)
            torch.testing.assert_close(
                results(found)[name], expected, rtol=bound, atol=bound, equal_nan=True, msg=name
            )


@pytest.mark.parametrize(
    ("envs", "devices", "sizes"),
    [(8, 2, [4, 4]), (5, 2, [2, 3]), (2, 2, [1, 1]), (7, 3, [2, 2, 3]), (3, 8, [1, 1, 1])],
)
def test_every_environment_is_on_one_device_and_no_device_is_idle(
    envs: int, devices: int, sizes: list[int]
) -> None:
    env = growth(devices, envs, [WIDER])
    env.reset(0)
    assert sorted(len(part.rows) for part in env.parts) == sizes
    assert len({part.device_index for part in env.parts}) == len(sizes)
    assert sorted(torch.cat([part.rows for part in env.parts]).tolist()) == list(range(envs))
    twins = torch.cat([part.twins for part in env.parts])
    assert sorted(twins.tolist()) == list(range(len(env.twin_groups)))


def test_loss_scales_of_all_devices_are_gathered() -> None:
    """In float16 every update changes the scales' counters, on all devices."""
    half = Precision("cpu", torch.float16)
    env = growth(2, 3, [WIDER], half, dtype=torch.float32)
    assert env.scales is not None
    play(env)
    assert bool(((env.scales.clean > 0) | (env.scales.skipped > 0)).all())
    kept = env.state()
    env.load_state(kept)
    alone = growth(1, 3, [WIDER], half, dtype=torch.float32)
    alone.load_state(kept)
    for name, value in alone.state().items():
        assert torch.equal(value, kept[name])


def test_an_error_names_shard_device_and_environments() -> None:
    env = growth(2, 5, [WIDER])
    env.reset(0)

    def failing(*_: object) -> None:
        raise ValueError("broken")

    env.parts[1].shard.step = failing  # type: ignore[method-assign]
    actions = torch.zeros(5, len(HEADS), dtype=torch.long)
    with pytest.raises(
        ShardError, match=r"shard 2 of 2 on cpu \(3 environments from 2 to 4\): ValueError: broken"
    ):
        env.step(actions)


@pytest.mark.parametrize(
    ("given", "device", "devices"),
    [
        ({}, "cpu", ("cpu",)),
        ({"device": "cuda:1"}, "cuda:1", ("cuda:1",)),
        ({"devices": ["cuda:1", "cpu"]}, "cuda:1", ("cuda:1", "cpu")),
        ({"devices": "cpu"}, "cpu", ("cpu",)),
        ({"devices": ["cpu", "cpu"], "device": "cpu"}, "cpu", ("cpu", "cpu")),
    ],
)
def test_device_is_the_first_of_devices(given: dict, device: str, devices: tuple) -> None:
    machine = unflatten(given).machine
    assert (machine.device, machine.devices) == (device, devices)
    again = unflatten({"device": "cuda:7"}, unflatten(given)).machine
    assert (again.device, again.devices) == ("cuda:7", ("cuda:7",))


REFUSED = [
    ({"device": "cuda:0", "devices": ["cpu", "cpu"]}, "device: 'cuda:0' and devices 'cpu cpu'"),
    ({"devices": []}, "devices: no device is given"),
    ({"gym": "CartPole-v1", "devices": ["cpu", "cpu"]}, "devices: a Gymnasium task takes one"),
    ({"experimental_gpu_preload_gather": True, "gpu_preload": False}, "leave out --no-gpu-preload"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_contradictory_device_settings_are_refused(given: dict, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        check(unflatten(given, None if "gym" in given else TrainConfig()))


def test_devices_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", partial(int, 2))
    assert resolve_devices(["cuda:0", "cuda:1"]) == (torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(UsageError, match="different kinds"):
        resolve_devices(["cpu", "cuda:0"])
