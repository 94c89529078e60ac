"""Events survive the way to disk and back."""

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from esper.karn.store import read_events
from esper.leyline.events import (
    LEVELS,
    Event,
    PPOUpdateCompleted,
    SeedPruned,
    decode,
    encode,
    number,
    numbers,
    to_floats,
)
from esper.nissa.hub import Hub
from esper.nissa.sinks import JsonLines


def update(metrics: dict[str, float]) -> PPOUpdateCompleted:
    return PPOUpdateCompleted(
        time=1.0, round=1, update=1, metrics={k: number(v) for k, v in metrics.items()}
    )


def test_numbers_that_are_not_finite_survive_and_are_never_null() -> None:
    values = [1.5, float("nan"), float("inf"), -float("inf"), 0.0]
    line = encode(update(dict(enumerate_names(values))))
    assert b"null" not in line
    back = to_floats(decode(line).metrics.values())
    assert back[0] == 1.5
    assert math.isnan(back[1])
    assert back[2:] == [float("inf"), -float("inf"), 0.0]
    assert numbers([float("nan")]) == ["NaN"]


def enumerate_names(values: list[float]) -> list[tuple[str, float]]:
    return [(f"m{i}", v) for i, v in enumerate(values)]


def test_the_hub_keeps_order_and_writes_only_what_the_level_wants(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    hub = Hub([JsonLines(path)], "minimal")
    for i in range(100):
        hub.emit(update({"i": i}))
        hub.emit(SeedPruned(time=0, round=1, step=1, environment=[], slot=[], blueprint=[]))
    hub.flush()
    assert len(path.read_bytes().splitlines()) == 100
    hub.close()
    assert [e.metrics["i"] for e in read_events(tmp_path, PPOUpdateCompleted)] == list(range(100))
    assert not list(read_events(tmp_path, SeedPruned))


def test_a_failing_sink_is_dropped_and_the_others_go_on(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    class Broken:
        def write(self, event: Event) -> None:
            raise OSError("disk on fire")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    path = tmp_path / "events.jsonl"
    hub = Hub([Broken(), JsonLines(path)], "normal")
    for i in range(3):
        hub.emit(update({"i": i}))
    hub.close()
    assert len(path.read_bytes().splitlines()) == 3
    assert capsys.readouterr().err.count("disk on fire") == 1


def test_a_corrupt_or_half_written_line_is_passed_over(tmp_path: Path) -> None:
    lines = encode(update({"i": 1})) + b'\n{"event_type":"NOPE"}\nnot json\n'
    (tmp_path / "events.jsonl").write_bytes(lines + encode(update({"i": 2})) + b'\n{"event_ty')
    assert [e.metrics["i"] for e in read_events(tmp_path, PPOUpdateCompleted)] == [1, 2]


def test_each_level_writes_what_the_one_below_writes_and_more() -> None:
    levels = [set(LEVELS[name]) for name in ("off", "minimal", "normal", "debug")]
    assert all(a < b for a, b in pairwise(levels))


def test_reading_events_needs_no_torch() -> None:
    """Whoever looks at a run should not have to load the training stack."""
    code = "import esper.karn.store, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
