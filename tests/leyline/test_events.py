"""Events: encoding, decoding, levels, old schemas and documentation."""

import ast
import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from esper.karn.store import read_events
from esper.leyline.events import (
    EVENTS,
    LEVELS,
    SCHEMA_VERSION,
    AnalyticsSnapshot,
    EpochCompleted,
    PPOUpdateCompleted,
    TrainingStarted,
    decode,
    encode,
    number,
    numbers,
    to_floats,
)
from esper.leyline.metrics import METRICS, PER_HEAD, Metric, part_metric

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded"


def update(metrics: dict[str, float]) -> PPOUpdateCompleted:
    return PPOUpdateCompleted(
        time=1.0, round=1, update=1, metrics={k: number(v) for k, v in metrics.items()}
    )


def test_non_finite_numbers_round_trip_and_are_never_null() -> None:
    values = [1.5, float("nan"), float("inf"), -float("inf"), 0.0]
    line = encode(update({f"m{i}": value for i, value in enumerate(values)}))
    assert b"null" not in line
    back = to_floats(decode(line).metrics.values())
    assert back[0] == 1.5
    assert math.isnan(back[1])
    assert back[2:] == [float("inf"), -float("inf"), 0.0]
    assert numbers([float("nan")]) == ["NaN"]


def test_corrupt_and_truncated_lines_are_skipped(tmp_path: Path) -> None:
    lines = encode(update({"i": 1})) + b'\n{"event_type":"NOPE"}\nnot json\n'
    (tmp_path / "events.jsonl").write_bytes(lines + encode(update({"i": 2})) + b'\n{"event_ty')
    assert [e.metrics["i"] for e in read_events(tmp_path, PPOUpdateCompleted)] == [1, 2]


def test_each_level_writes_a_superset_of_the_level_below() -> None:
    levels = [set(LEVELS[name]) for name in ("off", "minimal", "normal", "debug")]
    assert all(a < b for a, b in pairwise(levels))


def test_reading_events_needs_no_torch() -> None:
    """Tools that only read runs should not have to load the training stack."""
    code = "import esper.karn.store, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_values_are_null_and_differ_from_nan() -> None:
    event = update({})
    event.metrics.update({"head_grad_norms/op": None, "head_grad_norms/slot": "NaN"})
    assert b'"head_grad_norms/op":null,"head_grad_norms/slot":"NaN"' in encode(event)
    back = decode(encode(event)).metrics
    assert back["head_grad_norms/op"] is None
    assert back["head_grad_norms/slot"] == "NaN"


@pytest.mark.parametrize("text", ['"nan"', '"-NaN"', '"1.0"', '""', "[]", "true"])
def test_only_numbers_and_three_strings_are_numbers(text: str) -> None:
    line = encode(update({"m": 1.5})).replace(b"1.5", text.encode())
    with pytest.raises(msgspec.ValidationError):
        decode(line)


def test_lines_of_an_old_schema_are_read_with_defaults() -> None:
    run = RECORDED / "old_schema"
    lines = (run / "events.jsonl").read_bytes().splitlines()
    events = [decode(line) for line in lines]
    started = next(event for event in events if isinstance(event, TrainingStarted))
    assert started.schema == 2 < SCHEMA_VERSION
    assert (started.amp_dtype, started.blueprints, started.level) == (None, [], None)
    snapshot = next(event for event in events if isinstance(event, AnalyticsSnapshot))
    assert (snapshot.amp_scale, snapshot.learning_rates) == (None, {})
    assert len(list(read_events(run, EpochCompleted))) == 42


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
def test_only_fields_of_schema_2_are_required(kind: type[msgspec.Struct]) -> None:
    """Fields of schema 2 are required; later fields have defaults."""
    lines = (RECORDED / "old_schema" / "events.jsonl").read_text().splitlines()
    old = [json.loads(line) for line in lines]
    told = [event for event in old if event["event_type"] == kind.__struct_config__.tag]
    for field in msgspec.structs.fields(kind) if told else ():
        assert field.required == (field.name in told[0]), field.name


def test_every_reported_metric_is_documented() -> None:
    for run in ("healthy", "anomalous"):
        for event in read_events(RECORDED / run, PPOUpdateCompleted):
            assert event.metrics.keys() <= METRICS.keys()


HOMONYMS = {
    "leyline/metrics.py": set(METRICS) | set(PER_HEAD),
    "leyline/config": {"learning_rate", "entropy", "clip"}, "/native/": {"entropy", "loss"},
    "karn/sanctum/policy_page.py": {"entropy", "loss", "clip"},
    "runtime/task.py": {"learning_rate"}, "tolaria/results.py": {"loss"},
    "scripts/progress.py": {"entropy"}, "simic/training/replay.py": {"refused"},
    "own_models/": {"loss", "clip"}, "scripts/tasks.py": {"loss"},
    "scripts/grow_model.py": {"loss", "clip"},
}  # fmt: skip
"""Strings that name a setting, field, label or folder there, but would name a metric elsewhere."""


def test_metric_names_are_spelt_only_in_metrics_py() -> None:
    roots = tuple(part_metric(name, "") for name in (*PER_HEAD, Metric.LEARNING_RATE))
    for path in sorted((ROOT / "src" / "esper").rglob("*.py")):
        allowed = {
            word for place, words in HOMONYMS.items() if place in str(path) for word in words
        }
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                named = text in METRICS or text in PER_HEAD or text.startswith(roots)
                assert not named or text in allowed, f"{path}:{node.lineno}: {text}"


def test_events_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "write_event_docs.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
