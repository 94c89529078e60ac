"""What takes minutes: learning on the real task, and a run that is killed again and again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_run import TINY, assert_same, timeless, tiny

from esper.leyline.config import unflatten
from esper.simic.checkpoint import load_latest
from esper.simic.training.vectorized import run_training, train_ppo_vectorized

pytestmark = pytest.mark.slow


def test_the_demo_learns_to_grow(tmp_path: Path) -> None:
    """The budget of ``make demo``. The evidence with error bars is ``make bench-learning``."""
    settings = {"envs": 16, "rounds": 13, "telemetry_dir": str(tmp_path)}
    rounds = run_training(unflatten(settings), "ppo").rounds
    begin, end = rounds[:3], rounds[-3:]
    assert sum(r.gain for r in end) > sum(r.gain for r in begin)
    assert sum(r.gain for r in end) > 0.0
    assert all(r.fossilised >= 0.5 for r in end)


def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL at random times, then resumed: no round that was saved is lost or told twice."""
    rounds = 60
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    base = [sys.executable, "-m", "esper.scripts.train", "ppo", f"--rounds={rounds}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "killed"
    generator = random.Random(0)
    saved = 0
    for kill in range(8):
        runs = sorted(folder.glob("*/checkpoints/[0-9]*"))
        more = [f"--resume={runs[0].parents[1]}"] if runs else [*flags, f"--telemetry-dir={folder}"]
        if not runs and folder.exists():
            pytest.fail(f"kill {kill} left no checkpoint")
        process = subprocess.Popen(base + more, stdout=subprocess.DEVNULL, env=environment)
        deadline = time.time() + 60
        while time.time() < deadline and not list(folder.glob("*/checkpoints/[0-9]*")):
            time.sleep(0.02)
        time.sleep(4.0 * generator.random() + (3.0 if runs else 0.0))
        process.send_signal(signal.SIGKILL)
        if process.wait(60) != -signal.SIGKILL:
            break
        (run,) = folder.iterdir()
        now = load_latest(run).round
        assert now >= saved
        saved = now
    (run,) = folder.iterdir()
    if load_latest(run).round < rounds:
        subprocess.run([*base, f"--resume={run}"], check=True, env=environment, capture_output=True)
    straight = train_ppo_vectorized(tiny(tmp_path / "straight", rounds=rounds)).path
    assert_same(load_latest(straight).parts, load_latest(run).parts)
    assert timeless(straight) == timeless(run)
