"""The three profiling scripts on a small workload, and the race in which the hot path is timed."""

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from processes import called
from support import needs_native

# The workload registers tasks of its own, in whatever process imports it.
pytestmark = pytest.mark.usefixtures("scratch_register")

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
SMALL = (
    *("--envs", "2", "--episode-length", "6", "--episodes", "1", "--max-batches", "1"),
    *("--formats", "NCHW", "NHWC bfloat16", "--busy"),
)
KEYS = {
    *("task", "envs", "episode_length", "max_batches", "batch_size", "backend", "device", "amp"),
    *("compile", "telemetry", "lstm_hidden", "ppo_epochs", "threads", "eps", "step_ms_p50"),
    *("step_ms_p95", "naive_eps", "naive_way", "ratio", "lowest_ratio", "highest_ratio"),
    *("hosts", "rounds", "ways", "share_host", "share_policy", "share_update"),
    *("share_rest", "peak_gflops", "host_gflops", "torch", "device_name", "driver", "cuda", "git"),
}


@pytest.fixture
def run(monkeypatch, scripts_on_path: None) -> Callable[..., subprocess.CompletedProcess]:
    """Return a function that calls a script with arguments as a process would."""

    def script(name: str, *arguments: str) -> subprocess.CompletedProcess:
        path = str(SCRIPTS / name)

        def command(given: list[str]) -> int:
            monkeypatch.setattr(sys, "argv", [path, *given])
            runpy.run_path(path, run_name="__main__")
            return 0

        return called(list(arguments), Path.cwd(), command)

    return script


@needs_native
def test_the_hot_path_is_measured_beside_the_naive_loop(tmp_path: Path, run):
    """It is timed only after a check that both compute the same numbers."""
    file = tmp_path / "rows.json"
    done = run("benchmark_hot_path.py", *SMALL, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [row["backend"] for row in rows] == ["NativeBackend", "TorchBackend"]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["ratio"] == pytest.approx(row["eps"] / row["naive_eps"], rel=1e-6)
        assert row["lowest_ratio"] <= row["ratio"] <= row["highest_ratio"]
        assert {"1 x 1 thread, NCHW", "1 x 1 thread, NHWC bfloat16"} < row["ways"].keys()
        assert sum(way["won"] for way in row["ways"].values()) == row["rounds"] == 1
        assert row["naive_eps"] >= max(way["eps"] for way in row["ways"].values()) * (1 - 1e-6)
        shares = [row[f"share_{part}"] for part in ("host", "policy", "update", "rest")]
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) > 0
    written = file.with_suffix(".md").read_text()
    assert "| digits_shift | 2 | TorchBackend |" in written
    for way in rows[0]["ways"]:
        assert f"| digits_shift | 2 | {way} |" in written
    compared = run("benchmark_hot_path.py", "--compare", str(file), str(file))
    assert compared.returncode == 0
    assert "NativeBackend" in compared.stdout
    halves = [row | {"amp": True, "eps": 1.5 * row["eps"]} for row in rows]
    (tmp_path / "amp.json").write_text(json.dumps(halves))
    pairs = run("benchmark_hot_path.py", "--compare", str(file), str(tmp_path / "amp.json"))
    assert pairs.stdout.count("| False -> True |") == len(rows)
    assert pairs.stdout.count("| 1.50 |") == len(rows)


def test_nothing_is_timed_beside_other_work(run):
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        done = run("benchmark_hot_path.py", *SMALL[:-1])
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert done.returncode == 2
    assert "of the processors, which would spoil the ratios" in done.stderr
    assert done.stdout == ""


def test_a_backend_with_different_results_is_not_timed(monkeypatch, run):
    """The naive loop deliberately gets another learning rate."""
    naive = importlib.import_module("hot_path_naive").NaiveBackend
    original = naive._optimizers

    def slower(self, *given):
        own = original(self, *given)
        own[""].param_groups[0]["lr"] = 0.0
        return own

    monkeypatch.setattr(naive, "_optimizers", slower)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run("benchmark_hot_path.py", *SMALL)


def test_every_synchronisation_is_documented(run):
    done = run("profile_gpu_sync.py", "--envs", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT DOCUMENTED" not in done.stdout
    assert "simic/update_metrics.py:summarise" in done.stdout


def test_a_synchronisation_that_is_not_documented_fails(monkeypatch, capsys, scripts_on_path):
    script = importlib.import_module("profile_gpu_sync")
    monkeypatch.setattr(sys, "argv", ["x"])
    known, unknown = "simic/update_metrics.py:summarise", "simic/ppo.py:update"
    for steps, update, status in (
        ([known], [known], 0),
        ([unknown], [known], 1),
        ([], [unknown], 1),
    ):
        waits = script.Waits(Counter(steps), Counter(update), 1, None, "loop")
        monkeypatch.setattr(script, "profiled", lambda *given, found=waits: found)
        assert script.main() == status
        assert ("NOT DOCUMENTED" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "torch"])
def test_operations_are_listed_by_stage(backend: str, run):
    sizes = ("--envs", "4", "--episode-length", "6")
    done = run("profile_hot_path_operations.py", *sizes, "--backend", backend)
    assert done.returncode == 0, done.stderr
    for stage in ("train", "validate and ablate", "policy", "backward", "optimizer"):
        assert f"| {stage} |" in done.stdout


@pytest.fixture
def module(scripts_on_path: None) -> ModuleType:
    import hot_path_race

    return hot_path_race


def small(module: ModuleType, envs: int, **settings: int):
    given = {"episode_length": 3, "max_batches": 1, "telemetry": "off"} | settings
    return module.Workload(envs=envs, **given)


def test_the_fastest_naive_way_of_each_round_counts(module):
    seconds = {
        "ours": np.array([0.1, 0.1, 0.1]),
        "steady": np.array([2.0, 2.0, 2.0]),
        "lucky once": np.array([9.0, 1.0, 9.0]),
    }
    found = module.best_naive(seconds, ["steady", "lucky once"])
    assert found.fastest.tolist() == [2.0, 1.0, 2.0]
    assert found.way == "steady"
    assert found.won == {"steady": 2, "lucky once": 1}


@pytest.mark.parametrize(
    ("envs", "cores", "sizes"),
    [(64, 2, [32, 32]), (24, 2, [8, 16]), (20, 16, [8, 8, 4]), (2, 4, [2])],
)
def test_processes_share_the_environments_in_whole_groups(module, envs, cores, sizes):
    shares = module.shares(small(module, envs), cores)
    assert [share.envs for share in shares] == sizes
    assert [i for share in shares for i in range(share.first, share.first + share.envs)] == [
        *range(envs)
    ]
    assert all(share.threads == 1 for share in shares)


def losses(module: ModuleType, workload, form: str) -> torch.Tensor:
    loop = module.naive_loop(workload, 1, form)
    loop.begin()
    found = torch.stack([loop.step().report.train_loss for _ in range(workload.episode_length)])
    loop.close()
    return found


def test_the_shares_together_train_the_same_hosts_as_one_process(module):
    whole = small(module, 10)
    parts = [losses(module, share, "NHWC") for share in module.shares(whole, 2)]
    expected = losses(module, whole, "NCHW")
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)
    flat = losses(module, whole, "NHWC flat")
    torch.testing.assert_close(flat, expected, rtol=1e-4, atol=1e-4)
    half = losses(module, whole, "NHWC bfloat16")
    assert not torch.equal(half, expected)
    torch.testing.assert_close(half, expected, rtol=0.05, atol=0.05)


class Logged:
    """A contender that only says what is asked of it."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def __getattr__(self, method: str):
        return lambda *given: self.log.append(" ".join([self.name, method, *map(str, given)]))


def test_every_contender_takes_its_turn_in_every_round(module):
    log: list[str] = []
    contenders = {name: Logged(name, log) for name in "ab"}
    seconds = module.race(contenders, small(module, 2, episode_length=13), episodes=2)
    episode = ["a play 10", "b play 10", "a play 3", "a end", "b play 3", "b end"]
    assert log == [
        *("a begin", "b begin", *episode),
        *("a clear", "a begin", "b clear", "b begin", *episode),
        *("a begin", "b begin", *episode),
    ]
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 4, "b": 4}


def test_a_process_that_ends_is_reported(module):
    processes = module.Processes(small(module, 2), 1, ["NCHW"])
    for process in processes.processes:
        process.terminate()
        process.join()
    with pytest.raises(RuntimeError, match="a naive process ended"):
        processes.call("begin", "NCHW")
    processes.close()
