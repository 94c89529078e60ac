"""Whole runs on the virtual device: nothing mixed, nothing illegal, and only known waits.

The quick part belongs to ``make test``; the rest to ``make test-all``.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.karn.store import read_events
from esper.leyline.config import unflatten
from esper.leyline.events import AnalyticsSnapshot, EpochCompleted, PPOUpdateCompleted
from esper.runtime.gate import Permission
from esper.simic.growth.environment import _thread_pool
from esper.simic.training.vectorized import RunSummary, resume_ppo, run_training
from small_runs import SMALL
from virtual_device import Machine, virtual_device

STEP_LIMIT = 4
"""Times that a step may make the host wait for hosts of one shape, telemetry included."""

TELEMETRY_LAUNCHES = 42
"""Launches that telemetry may add to a step: 38 or 41, as what grows in these short runs differs
without and with the baseline of the group."""

IN_A_STEP = {
    "tamiyo/step_functions.py:act": "which seeds live where decides what is launched",
    "simic/growth/shard.py:_run_epoch": "whether any host was rolled back",
    "simic/growth/shard.py:_restore": "data of the hosts that were rolled back; only then",
    "tolaria/backends/__init__.py:__iter__": "streamed images: which of them the epoch draws",
}
"""Places that wait in every step, and why."""

RUN: dict[str, Any] = SMALL | {
    "device": "cuda:0", "rounds": 3, "episode_length": 6, "ppo_epochs": 4,
    "telemetry_level": "debug",
}  # fmt: skip


class Steps:
    """Counts the waits of every step after those of the first round, which fills caches."""

    def __init__(self, machine: Machine):
        self.machine, self.counts, self.rounds = machine, [], 0
        self.before: Counter[Any] = Counter()

    def started(self, *_: Any) -> None:
        """See ``Observer``."""

    def stepped(self, step: Any) -> None:
        now = Counter({key: n for key, n in self.machine.syncs.items() if key[0] != "nissa"})
        if self.rounds and self.before:
            self.counts.append(now - self.before)
        self.before = Counter() if step.done else now

    def round_done(self, summary: Any) -> None:
        self.rounds += 1


def trained(tmp_path: Path, machine: Machine, **settings: Any) -> tuple[RunSummary, Steps]:
    """A run on the machine and the waits of its steps."""
    _thread_pool.cache_clear()  # threads of an earlier test are not those of this machine
    steps = Steps(machine)
    config = unflatten(RUN | {"telemetry_dir": str(tmp_path)} | settings)
    permission = Permission(config.world.plugin)
    algorithm = config.method.algorithm
    summary = run_training(config, algorithm, observer=steps, permission=permission)
    assert (summary.status, summary.exit_code) == ("finished", 0)
    return summary, steps


def assert_clean(machine: Machine, graphs: int = 2) -> None:
    """Nothing was refused, and the rollout step and the update were captured and replayed."""
    assert machine.faults == []
    assert len(machine.graphs) == graphs
    assert all(graph.replays > 1 for graph in machine.graphs)


def assert_few_waits(steps: Steps, shapes: int) -> None:
    assert steps.counts
    for count in steps.counts:
        assert sum(count.values()) <= STEP_LIMIT * shapes, count
        assert {where for _, _, where in count} <= IN_A_STEP.keys(), count


def check(
    tmp_path: Path, devices: int = 1, graphs: int = 2, shapes: int = 1, **settings: Any
) -> Machine:
    with virtual_device(devices) as machine:
        summary, steps = trained(tmp_path, machine, **settings)
    assert_clean(machine, graphs)
    assert_few_waits(steps, shapes)
    updates = list(read_events(summary.path, PPOUpdateCompleted))
    assert [update.round for update in updates] == [1, 2, 3]
    assert all(update.metrics["refused"] == 0.0 for update in updates)
    assert len(list(read_events(summary.path, EpochCompleted))) == 3 * RUN["episode_length"]
    return machine


def test_convolutional_hosts_grow_on_the_second_device(tmp_path: Path) -> None:
    machine = check(tmp_path, devices=2, device="cuda:1")
    assert {str(graph.device) for graph in machine.graphs} == {"cuda:1"}
    assert machine.ledger(torch.device("cuda:0")).peak == 0


SLOW = pytest.mark.slow
HALF = {"use_amp": True, "amp_dtype": "float16", "amp_policy": True}
OWN = str(Path(__file__).parent.parent / "examples" / "own_model.py")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"task": "digits_mlp", "slots": ("r0c0", "wide")}, id="mlp"),
        pytest.param({"slots": ("wide",)}, id="wide", marks=SLOW),
        pytest.param({"task": "own_model", "plugin": [OWN]}, id="module", marks=SLOW),
        pytest.param({"task": "text_gpt", "batch_size": 2, "envs": 2}, id="text", marks=SLOW),
        pytest.param({"task": "suite", "envs": 14, "shapes": 3}, id="suite", marks=SLOW),
        pytest.param({"use_amp": True}, id="bfloat16", marks=SLOW),
        pytest.param(HALF, id="float16", marks=SLOW),
        pytest.param({"gpu_preload": False}, id="streamed", marks=SLOW),
        pytest.param({"compile": "off", "graphs": 0}, id="eager", marks=SLOW),
        pytest.param({"algorithm": "impala"}, id="impala", marks=SLOW),
    ],
)
def test_every_kind_of_run_is_clean(settings: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, HALF], ids=["float32", "float16"])
def test_hosts_on_two_devices(settings: dict[str, Any], tmp_path: Path) -> None:
    """Each device is waited for twice in a step."""
    with virtual_device(2) as machine:
        devices = ["cuda:0", "cuda:1"]
        _, steps = trained(tmp_path, machine, device="cuda:0", devices=devices, **settings)
    assert_clean(machine)
    assert_few_waits(steps, shapes=2)
    assert all(machine.ledger(torch.device(name)).peak > 0 for name in devices)


@pytest.mark.slow
def test_a_run_on_a_device_resumes(tmp_path: Path) -> None:
    with virtual_device() as machine:
        summary, _ = trained(tmp_path, machine, **HALF)
        resume_ppo(summary.path, {"rounds": 6})
    assert_clean(machine, graphs=4)
    rounds = [update.round for update in read_events(summary.path, PPOUpdateCompleted)]
    assert rounds == [1, 2, 3, 4, 5, 6]
    assert {snapshot.amp_enabled for snapshot in read_events(summary.path, AnalyticsSnapshot)} == {
        True
    }


def test_captured_training_is_eager_training_bit_for_bit(tmp_path: Path) -> None:
    """The virtual device computes with the same kernels in both, so a difference is a capture's."""
    found = []
    for name in ("off", "default"):
        with virtual_device() as machine:
            summary, _ = trained(tmp_path / name, machine, compile=name, rounds=2)
        assert_clean(machine, graphs=2 if name == "default" else 0)
        updates = read_events(summary.path, PPOUpdateCompleted)
        found.append([update.metrics for update in updates])
    assert found[0] == found[1]


def test_updates_of_a_gymnasium_task_are_captured_whatever_the_lengths_of_its_episodes(
    tmp_path: Path,
) -> None:
    rounds, epochs, minibatches = 6, 4, 2
    settings = {
        "device": "cuda:0", "gym": "CartPole-v1", "envs": 4, "rollout_steps": 16, "rounds": rounds,
        "ppo_epochs": epochs, "minibatches": minibatches, "lstm_hidden": 8, "target_kl": 100.0,
        "telemetry_dir": str(tmp_path), "telemetry_level": "debug",
    }  # fmt: skip
    with virtual_device() as machine:
        summary = run_training(unflatten(settings), "ppo")
    assert summary.status == "finished"
    assert machine.faults == []
    acting, *updates = machine.graphs
    assert acting.replays > 80
    # Before a shape is captured, it is computed eagerly a few times.
    shapes = len(updates)
    assert shapes < rounds
    assert sum(graph.replays for graph in updates) > rounds * epochs * minibatches // 2


@pytest.mark.slow
def test_telemetry_costs_no_wait_and_few_launches(tmp_path: Path) -> None:
    """The target in docs/performance.md; at every level the training thread waits equally often."""
    launches, waits = {}, {}
    for level in ("off", "debug"):
        with virtual_device() as machine:
            _, steps = trained(tmp_path / level, machine, telemetry_level=level)
        assert machine.faults == []
        launches[level] = sum(machine.launches.values()) / (3 * RUN["episode_length"])
        waits[level] = [sum(count.values()) for count in steps.counts]
    print(launches, waits)
    assert waits["off"] == waits["debug"]
    assert launches["debug"] - launches["off"] <= TELEMETRY_LAUNCHES
