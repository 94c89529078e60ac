"""Rows are cut by what fits into a device, shown on the virtual device."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.runtime.tasks import find
from esper.simic.growth.environment import GrowthEnv
from esper.simic.training.vectorized import run_training
from esper.tolaria import memory
from esper.tolaria.backends.choice import torch_backend
from esper.tolaria.memory import parts_within, row_memory
from esper.tolaria.precision import Precision
from small_runs import SMALL
from support import small_environments, small_host, small_mlp
from virtual_device import virtual_device

GPU = torch.device("cuda:0")
MIB = 1 << 20


def test_a_row_takes_what_peak_memory_grows_by() -> None:
    """Activations and the neighbourhoods of a convolution, which a GPU multiplies as matrices.

    On a CPU, which convolves without them, the slope of resident memory is 3.4 MiB
    (benchmarks/results/memory.md).
    """
    task = find("digits_shift")
    with virtual_device() as machine:
        memory = row_memory(task.host, Precision("cuda"), torch.float32, GPU, task.batch_size)
        assert machine.faults == []
        assert torch.cuda.memory_allocated(GPU) < MIB
    assert memory.active / MIB == pytest.approx(7.2, rel=0.1)
    assert memory.stored < 0.1 * MIB


def test_what_a_library_allocates_once_is_not_taken_for_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the workspace of cuBLAS, which made a row on an H100 60 kB instead of 7 MiB."""
    task, workspace = find("digits_shift"), []
    run_once = memory.run_once

    def first_allocates(*arguments: Any) -> None:
        if not workspace:
            workspace.append(torch.empty(64 * MIB, dtype=torch.uint8, device=GPU))
        run_once(*arguments)

    monkeypatch.setattr(memory, "run_once", first_allocates)
    with virtual_device():
        row = row_memory(task.host, Precision("cuda"), torch.float32, GPU, task.batch_size)
        assert row.active / MIB == pytest.approx(7.2, rel=0.1)


@pytest.mark.parametrize(
    ("most", "groups", "parts"),
    [
        (100, [8] * 8, 1),  # 64 environments and 8 twins
        (71, [8] * 8, 2),
        (36, [8] * 8, 4),
        (9, [8] * 8, 8),
        (9, [8, 8, 8], 3),
        (40, [3, 5, 2], 1),
    ],
)
def test_parts_are_few_and_fit(most: int, groups: list[int], parts: int) -> None:
    with virtual_device():
        assert parts_within(most, groups, GPU) == parts


def test_a_group_that_does_not_fit_is_refused_with_one_that_does() -> None:
    says = r"group_size: a group of 8 .*3\.0 GiB.*cuda:0; --group-size 5 fits"
    with virtual_device(capacity=3 << 30), pytest.raises(UsageError, match=says):
        parts_within(6, [8, 8], GPU)


def environment(capacity: int, envs: int = 16) -> GrowthEnv:
    """Environments on a device with so many bytes, after one step."""
    settings = {"seed": 3, "episode_length": 4, "batch_size": 64, "backend": "torch"}
    with virtual_device(capacity=capacity) as machine:
        tasks = [find("digits_shift")]
        env = small_environments(tasks, envs, Precision("cuda"), [GPU], **settings)
        env.reset(0)
        torch.cuda.reset_peak_memory_stats(GPU)
        env.step(torch.zeros(envs, 8, dtype=torch.long).to(GPU))
        assert machine.faults == []
        env.peak = machine.ledger(GPU).peak  # type: ignore[attr-defined]
    return env


def test_less_memory_means_more_parts_that_fit() -> None:
    plenty = environment(1 << 30)
    assert len(plenty.parts) == 1
    little = environment(64 * MIB)
    assert len(little.parts) > 1
    sizes = [len(part.rows) for part in little.parts]
    assert sum(sizes) == 16
    assert little.peak < plenty.peak  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_run_without_memory_ends_with_one_line_that_says_what_fits(tmp_path: Path) -> None:
    settings = SMALL | {
        "device": "cuda:0", "rounds": 2, "envs": 8, "lstm_hidden": 256,
        "telemetry_dir": str(tmp_path), "compile": "default",
    }  # fmt: skip
    with virtual_device() as machine:
        run_training(unflatten(settings | {"telemetry_dir": str(tmp_path / "all")}), "ppo")
        needed = machine.ledger(GPU).peak
    with virtual_device(capacity=int(0.6 * needed)), pytest.raises(UsageError) as raised:
        run_training(unflatten(settings), "ppo")
    message = str(raised.value)
    assert message.startswith("envs: 8 do not fit into the memory of cuda:0: at least ")
    assert "\n" not in message
    fits = int(message.partition("about ")[2].split()[0])
    assert 1 <= fits < 8


def test_large_blocks_of_memory_are_never_mapped_anew(monkeypatch) -> None:
    options: dict[int, int] = {}

    def mallopt(option: int, value: int) -> int:
        options[option] = value
        return 1

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(memory.sys, "platform", "linux")
    assert memory.keep_memory.__wrapped__()
    # mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD.
    assert options == {-4: 0, -1: 2**30, -2: 2**28}
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert not memory.keep_memory.__wrapped__()


def test_no_pass_holds_more_than_a_hundred_validation_images() -> None:
    sizes = {
        torch_backend(host, Precision("cpu")).evaluation_batch
        for host in (small_host(), small_mlp(), find("digits").host, find("digits_wide").host)
    }
    assert 1 <= min(sizes) <= max(sizes) == 100
