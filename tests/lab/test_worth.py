"""Reading the benchmark's table of the gain from growing."""

import json
from pathlib import Path

import msgspec
import pytest

from esper.runtime.tasks import SUITES
from esper_lab.worth import TABLE, Worth, read_worth

ENTRY = {
    "gain": [7.0, 6.1, 7.9],
    "validation_gain": 7.5,
    "schedule": "conv_heavy in r0c0 from step 0",
    "network": "never grow, tuned",
    "network_gain": 3.2,
}


def written(folder: Path, content: object) -> Path:
    path = folder / "task_table.json"
    path.write_text(json.dumps(content))
    return path


def test_the_table_is_read_as_it_stands(tmp_path: Path):
    worth = read_worth(written(tmp_path, {"tasks": {"digits": ENTRY}, "hardware": "any"}))
    found = Worth((7.0, 6.1, 7.9), 7.5, "conv_heavy in r0c0 from step 0", "never grow, tuned", 3.2)
    assert worth == {"digits": found}


def test_missing_table_gives_no_entries(tmp_path: Path):
    assert read_worth(tmp_path / "task_table.json") == {}


def test_table_of_another_format_is_an_error(tmp_path: Path):
    less = {name: value for name, value in ENTRY.items() if name != "validation_gain"}
    with pytest.raises(msgspec.ValidationError, match="validation_gain"):
        read_worth(written(tmp_path, {"tasks": {"digits": less}}))


def test_the_shipped_table_covers_every_task_of_the_suites_or_none():
    assert read_worth().keys() in (set(), {*SUITES["suite"], *SUITES["held_out"]})
    assert TABLE.parent.name == "esper_lab"
