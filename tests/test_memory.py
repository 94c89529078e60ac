"""An environment takes as much memory as `benchmarks/results/memory.json` says."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
DOCUMENTED = json.loads((BENCHMARKS / "results" / "memory.json").read_text())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures as Linux counts")
@pytest.mark.parametrize("task", list(DOCUMENTED))
def test_the_slope_of_peak_memory_is_the_documented_one(task: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import memory

    assert memory.slope(task) == pytest.approx(DOCUMENTED[task], rel=0.2)
    assert memory.slope(task, "native") < 1.2 * DOCUMENTED[task]
