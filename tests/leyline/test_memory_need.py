"""Requests that do not fit into memory are refused before they are tried."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from esper.leyline import memory_need as memory
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.leyline.memory_need import GIB, available_memory, check_memory, task_needs
from esper.runtime.tasks import TASKS, find
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.training.setup import build_environment
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tolaria.memory import stored_bytes


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GiB."""
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * GIB)


@pytest.mark.parametrize(
    ("setting", "value"), [("envs", 65_536), ("envs", 40_000), ("lstm_hidden", 16_384)]
)
def test_a_big_request_is_one_line_and_writes_nothing(
    setting: str, value: int, eight: None, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flag = f"--{setting.replace('_', '-')}={value}"
    assert run_guarded(esper, ["train", "ppo", flag]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"esper: {setting}: {value} need at least ")
    assert "8.0 GiB are available; about" in line
    assert not list(tmp_path.iterdir())


def test_what_fits_according_to_the_line_fits(eight: None) -> None:
    for name, value in (("envs", 65_536), ("lstm_hidden", 16_384)):
        with pytest.raises(UsageError) as error:
            check_memory(unflatten({name: value}))
        fits = int(str(error.value).split("; about ")[1].split()[0])
        check_memory(unflatten({name: fits}))
        with pytest.raises(UsageError):
            check_memory(unflatten({name: int(fits * 1.1)}))


def test_the_answer_needs_no_torch() -> None:
    code = (
        "import sys, esper.scripts.train, esper.leyline.memory_need; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_the_estimate_counts_what_there_is() -> None:
    """The LSTM's parameters, and the table of tasks, which scripts/write_task_needs.py writes."""
    width = 64
    parameters = sum(p.numel() for p in FactoredLSTM(width).lstm.parameters())
    assert memory.policy_bytes(width) == parameters * 4 * 4
    for name in TASKS:
        task, need = find(name), task_needs()[name]
        assert (need.host_bytes, need.episode_length) == (
            int(stored_bytes(task.host)),
            task.episode_length,
        ), name
    assert set(task_needs()) == set(TASKS)


def test_hosts_of_your_own_are_estimated_when_they_are_known(monkeypatch) -> None:
    import torch

    config = unflatten({"envs": 2, "group_size": 2})
    need = 3 * stored_bytes(find("digits_shift").host)
    for there, refused in ((need, True), (GIB, False)):
        monkeypatch.setattr(memory, "available_memory", lambda there=there: there)
        if refused:
            with pytest.raises(UsageError, match=r"^envs: 2 need at least 0\.0 GiB"):
                build_environment(config, [torch.device("cpu")])
        else:
            build_environment(config, [torch.device("cpu")])


def system(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:    5000 kB"}


def test_memory_of_the_machine(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    assert available_memory(system(tmp_path, MEMINFO)) == 5000 * 1024


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"a/b": ("3000000", "1000000")}, 2_000_000),
        ({"a/b": ("max", "1000000"), "a": ("1500000", "1000000")}, 500_000),
        ({"a/b": ("9000000", "10"), "": ("4000000", "0")}, 4_000_000),
        ({"a/b": ("max", "10")}, 5000 * 1024),
        ({"a/b": ("1000", "2000")}, 0),
    ],
)
def test_limits_of_a_container(tmp_path: Path, limits, expected: int) -> None:
    files = {**MEMINFO, "proc/self/cgroup": "0::/a/b"}
    for place, (most, used) in limits.items():
        files[f"sys/fs/cgroup/{place}/memory.max"] = most
        files[f"sys/fs/cgroup/{place}/memory.current"] = used
    assert available_memory(system(tmp_path, files)) == expected


def test_limits_of_an_older_container(tmp_path: Path) -> None:
    """Files in the cache count as free."""
    place = "sys/fs/cgroup/memory/docker"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "4:cpu:/x\n3:memory:/docker",
        f"{place}/memory.limit_in_bytes": 3_000_000,
        f"{place}/memory.usage_in_bytes": 2_500_000,
        f"{place}/memory.stat": "cache 7\ntotal_inactive_file 400000",
    }
    assert available_memory(system(tmp_path, files)) == 900_000


def test_the_limit_of_the_process_counts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1234, resource.RLIM_INFINITY))
    assert available_memory(system(tmp_path, MEMINFO)) == 1234
