"""An environment takes as much memory as `benchmarks/results/memory.json` says."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUICK = ("digits_mlp", "digits_narrow")
DOCUMENTED = json.loads((BENCHMARKS / "results" / "memory.json").read_text())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures as Linux counts")
@pytest.mark.parametrize(
    "task",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in DOCUMENTED],
)
def test_the_slope_of_peak_memory_is_the_documented_one(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import memory

    assert memory.slope(task) == pytest.approx(DOCUMENTED[task], rel=0.2)
    assert memory.slope(task, "native") < 1.2 * DOCUMENTED[task]
