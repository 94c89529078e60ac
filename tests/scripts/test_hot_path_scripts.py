"""The three profiling scripts run without arguments, here on little work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import needs_native

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
KEYS = {
    *("task", "envs", "episode_length", "max_batches", "batch_size", "backend", "device", "amp"),
    *("compile", "telemetry", "lstm_hidden", "ppo_epochs", "threads", "eps", "step_ms_p50"),
    *("step_ms_p95", "naive_eps", "ratio", "share_host", "share_policy", "share_update"),
    *("share_rest", "peak_gflops", "host_gflops", "torch", "device_name", "driver", "cuda", "git"),
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return run_python(str(SCRIPTS / script), *arguments)


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@needs_native
def test_the_hot_path_is_measured_beside_the_naive_loop(tmp_path: Path):
    """After it was checked that both compute the same numbers."""
    file = tmp_path / "rows.json"
    small = ("--envs", "4", "--episode-length", "6", "--episodes", "1", "--max-batches", "2")
    done = run("benchmark_hot_path.py", *small, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [row["backend"] for row in rows] == ["NativeBackend", "TorchBackend"]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["ratio"] == pytest.approx(row["eps"] / row["naive_eps"], rel=1e-6)
        shares = [row[f"share_{part}"] for part in ("host", "policy", "update", "rest")]
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) > 0
    assert "| digits_shift | 4 | TorchBackend |" in file.with_suffix(".md").read_text()
    compared = run("benchmark_hot_path.py", "--compare", str(file), str(file))
    assert compared.returncode == 0
    assert "NativeBackend" in compared.stdout


def test_a_backend_that_computes_something_else_is_not_timed(tmp_path: Path):
    """Broken on purpose: the naive loop gets another learning rate."""
    broken = (
        "import sys; sys.path.insert(0, {scripts!r})\n"
        "import benchmark_hot_path as script, hot_path_naive as naive\n"
        "original = naive.NaiveBackend._optimizers\n"
        "def slower(self, *given):\n"
        "    own = original(self, *given)\n"
        "    own[''].param_groups[0]['lr'] = 0.0\n"
        "    return own\n"
        "naive.NaiveBackend._optimizers = slower\n"
        "sys.argv = ['x', '--envs', '4', '--episode-length', '6', '--episodes', '1']\n"
        "script.main()\n"
    )
    done = run_python("-c", broken.format(scripts=str(SCRIPTS)))
    assert done.returncode != 0
    assert "Tensor-likes are not close" in done.stderr


def test_every_synchronisation_is_documented():
    done = run("profile_gpu_sync.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT DOCUMENTED" not in done.stdout
    assert "simic/ppo.py:_summary" in done.stdout


def test_a_synchronisation_that_is_not_documented_fails():
    undocumented = (
        "import sys; sys.path.insert(0, {scripts!r})\n"
        "import profile_gpu_sync as script\n"
        "del script.DOCUMENTED['simic/ppo.py:_summary']\n"
        "sys.argv = ['x']\n"
        "sys.exit(script.main())\n"
    )
    done = run_python("-c", undocumented.format(scripts=str(SCRIPTS)))
    assert done.returncode == 1
    assert "NOT DOCUMENTED" in done.stdout


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "torch"])
def test_operations_are_told_by_stage(backend: str):
    done = run(
        "profile_hot_path_operations.py",
        *("--envs", "4", "--episode-length", "6", "--backend", backend),
    )
    assert done.returncode == 0, done.stderr
    for stage in ("train", "validate and ablate", "policy", "backward", "optimizer"):
        assert f"| {stage} |" in done.stdout
