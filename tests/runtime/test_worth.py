"""Reading the benchmark's table of the gain from growing."""

import json
from pathlib import Path

import msgspec
import pytest

from esper.runtime.tasks import SUITES
from esper.runtime.worth import TABLE, read_worth

ENTRY = {
    "never": {"utility": 0.45, "accuracy": 0.47},
    "best_fixed": {
        "schedule": "conv_heavy in r0c0 from step 0",
        "utility": 0.52,
        "accuracy": 0.59,
        "gain_interval": [0.061, 0.079],
    },
}


def written(folder: Path, content: object) -> Path:
    path = folder / "task_table.json"
    path.write_text(json.dumps(content))
    return path


def test_gain_is_the_utility_difference_in_percentage_points(tmp_path: Path):
    worth = read_worth(written(tmp_path, {"tasks": {"digits": ENTRY}, "hardware": "any"}))
    assert worth.keys() == {"digits"}
    found = worth["digits"]
    assert found.gain == pytest.approx(7.0)
    assert (found.low, found.high) == pytest.approx((6.1, 7.9))
    assert found.schedule == "conv_heavy in r0c0 from step 0"


def test_missing_table_gives_no_entries(tmp_path: Path):
    assert read_worth(tmp_path / "task_table.json") == {}


def test_table_of_another_format_is_an_error(tmp_path: Path):
    with pytest.raises(msgspec.ValidationError, match="never"):
        read_worth(written(tmp_path, {"tasks": {"digits": {"best_fixed": ENTRY["best_fixed"]}}}))


def test_shipped_table_covers_every_task_of_the_suites():
    assert read_worth().keys() == {*SUITES["suite"], *SUITES["held_out"]}
    assert TABLE.parent.name == "runtime"
