"""Tests that take minutes: learning on the real task."""

from pathlib import Path

import pytest

from esper.leyline.config import unflatten
from esper.simic.training.vectorized import run_training

pytestmark = pytest.mark.slow


def test_the_demo_learns_to_grow(tmp_path: Path) -> None:
    """The budget of ``make demo``. The evidence with error bars is ``make bench-suite``."""
    settings = {"envs": 16, "rounds": 13, "telemetry_dir": str(tmp_path)}
    rounds = run_training(unflatten(settings), "ppo").rounds
    begin, end = rounds[:3], rounds[-3:]
    assert sum(r.gain for r in end) > sum(r.gain for r in begin)
    assert sum(r.gain for r in end) > 0.0
    assert all(r.fossilised >= 0.5 for r in end)
