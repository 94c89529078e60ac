"""Event files: where they are cut, what is on the disk, and what a failure leaves."""

import os
from pathlib import Path

import pyarrow.parquet
import pytest

from esper.leyline.config.groups import OutputConfig
from esper.leyline.events import PPOUpdateCompleted, encode
from esper.nissa import sinks
from esper.nissa.sinks import JsonLines, run_sinks

EVENT = PPOUpdateCompleted(time=1.0, round=1, update=1, metrics={})
LINE = encode(EVENT) + b"\n"


def parts(run: Path) -> int:
    return len(list((run / "events").glob("*.parquet")))


def test_a_part_is_as_large_as_the_settings_say(tmp_path: Path) -> None:
    lines = run_sinks(tmp_path, OutputConfig(events_megabytes=3))[0]
    assert isinstance(lines, JsonLines)
    assert lines._part_bytes == 3 << 20
    lines._part_bytes = lines._limit = 2 * len(LINE)
    lines.write(EVENT)
    assert parts(tmp_path) == 0
    lines.write(EVENT)  # exactly the size of a part
    assert parts(tmp_path) == 1
    assert (tmp_path / "events.jsonl").stat().st_size == 0
    lines.close()


def test_folders_are_on_the_disk_before_the_lines_leave_their_file(tmp_path, monkeypatch) -> None:
    sync, synced = sinks._sync, []

    def recorded(folder: Path) -> None:
        synced.append((folder.name, (tmp_path / "events.jsonl").stat().st_size))
        sync(folder)

    monkeypatch.setattr(sinks, "_sync", recorded)
    (tmp_path / "events.jsonl").write_bytes(LINE)
    descriptors = len(os.listdir("/dev/fd"))
    sinks.rotate(tmp_path, 1)
    assert synced == [("events", len(LINE)), (tmp_path.name, 0)]
    assert len(os.listdir("/dev/fd")) == descriptors


def test_lines_that_could_not_be_moved_are_tried_again_after_as_many_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def full(run: Path, size: int) -> None:
        sizes.append((run / "events.jsonl").stat().st_size // len(LINE))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "rotate", full)
    lines = JsonLines(tmp_path, 3 * len(LINE))
    for _ in range(10):
        lines.write(EVENT)
    lines.close()
    assert sizes == [3, 6, 9]
    assert (tmp_path / "events.jsonl").read_bytes() == 10 * LINE


def test_the_typed_copy_has_every_whole_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(3 * LINE + LINE[:-5])
    sinks.write_parquet(tmp_path, tmp_path / "events.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "events.parquet")
    assert rows["data"].to_pylist() == 3 * [LINE.decode().strip()]
    assert set(rows["event_type"].to_pylist()) == {"PPO_UPDATE_COMPLETED"}
