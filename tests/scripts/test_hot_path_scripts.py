"""The three profiling scripts run without arguments, here on a small workload."""

import importlib
import json
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import called
from support import needs_native

# The workload registers tasks of its own, in whatever process imports it.
pytestmark = pytest.mark.usefixtures("scratch_register")

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
SMALL = ("--envs", "2", "--episode-length", "6", "--episodes", "1", "--max-batches", "1")
KEYS = {
    *("task", "envs", "episode_length", "max_batches", "batch_size", "backend", "device", "amp"),
    *("compile", "telemetry", "lstm_hidden", "ppo_epochs", "threads", "eps", "step_ms_p50"),
    *("step_ms_p95", "naive_eps", "naive_way", "ratio", "lowest_ratio", "highest_ratio"),
    *("rounds", "ways", "share_host", "share_policy", "share_update"),
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
        assert {"1 thread, NCHW", "1 thread, NHWC"} < row["ways"].keys()
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
    done = run("profile_gpu_sync.py")
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
