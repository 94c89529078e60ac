"""Signals of empty slots in the observations of environments: when they are known, and merging."""

import pytest
import torch
from faults import in_loss
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, HEADS, Op
from esper.leyline.stages import Stage
from esper.runtime.tasks import Task
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.policy.features import EMPTY_SLOT_SIGNALS, SLOT_FEATURES
from esper.tolaria.precision import Precision
from support import CPU, needs_native, small_gpt, small_host, small_mlp, small_task

SIGNALS = [SLOT_FEATURES.index(name) for name in EMPTY_SLOT_SIGNALS]
KNOWN = 0


def environment(*tasks: Task, devices: int = 1, **settings: object) -> GrowthEnv:
    """Four environments in groups of one."""
    chosen = {"group_size": 1, "max_batches": 2, "batch_size": 8, "backend": "torch"} | settings
    config = GrowthConfig(seed=5, episode_length=12, **chosen)
    assignment = torch.arange(4) % len(tasks)
    places = [CPU] * devices
    return GrowthEnv(
        tasks, torch.arange(4), config, Precision("cpu"), *places, assignment=assignment
    )


def actions(*germinating: int) -> Tensor:
    """WAIT, except that these environments germinate a seed in their first slot."""
    chosen = torch.zeros(4, len(HEADS), dtype=torch.long)
    chosen[list(germinating), HEADS.index("op")] = Op.GERMINATE
    chosen[list(germinating), HEADS.index("blueprint")] = BLUEPRINTS.index("conv_small")
    return chosen


def test_signals_are_known_in_slots_without_a_seed_after_the_first_step() -> None:
    env = environment(small_task(small_host()))
    first = env.reset(0).slots[..., SIGNALS]
    assert not first.any()
    step = env.step(actions(1))
    signals, stage = step.observation.slots[..., SIGNALS], step.report.after.stage
    empty = stage == Stage.DORMANT
    assert (~empty).nonzero().tolist() == [[1, 0]]
    assert torch.equal(signals[..., KNOWN] == 1.0, empty)
    assert not signals[1, 0].any()
    assert bool((signals[empty] != 0.0).sum(-1).ge(len(SIGNALS) - 1).all())
    assert not torch.equal(signals, env.step(actions()).observation.slots[..., SIGNALS])


def test_signals_are_unknown_in_the_step_of_a_rollback() -> None:
    env = environment(small_task(small_host()))
    env.reset(0)
    env.step(actions())
    (shard,) = env.shards
    disarm = in_loss(2, float("nan"))(shard)
    step = env.step(actions())
    disarm()
    known = step.observation.slots[..., SIGNALS[KNOWN]]
    assert step.report.rollback.nonzero().flatten().tolist() == [2]
    assert known.all(1).tolist() == [True, True, False, True]
    assert not step.observation.slots[2][:, SIGNALS].any()
    assert bool((env.step(actions()).observation.slots[..., SIGNALS[KNOWN]] == 1.0).all())


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_signals_do_not_depend_on_devices_and_shards(backend: str) -> None:
    tasks = small_task(small_host()), small_task(small_mlp())
    seen = []
    for devices in (1, 2):
        env = environment(*tasks, devices=devices, backend=backend)
        env.reset(0)
        env.step(actions(0))
        seen.append(env.step(actions()).observation.slots[..., SIGNALS])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
    assert bool(seen[0][1::2, :, KNOWN].all())


@needs_native
def test_native_hosts_show_the_signals_of_torch() -> None:
    seen = []
    for backend in ("torch", "native"):
        env = environment(small_task(small_host()), backend=backend, dtype=torch.float32)
        env.reset(0)
        seen.append(env.step(actions(3)).observation.slots[..., SIGNALS])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-3, atol=1e-3)


def test_sequences_and_hosts_of_fewer_slots_are_padded_with_0() -> None:
    tasks = small_task(small_gpt()), small_task(small_gpt(layers=1))
    env = environment(*tasks)
    env.reset(0)
    signals = env.step(actions()).observation.slots[..., SIGNALS]
    assert signals[..., KNOWN].tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]] * 2
    assert not signals[1::2, 1:].any()
