"""Events that move to compressed parts: every reader finds every line once, at any moment."""

import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from esper.karn import queries
from esper.karn.queries import Store
from esper.karn.report.gather import RunData
from esper.karn.sanctum.log import EventLog
from esper.leyline.events import EpochCompleted, Event, PPOUpdateCompleted, decode, encode, parts
from esper.leyline.events.reader import EventReader
from esper.nissa import sinks
from esper.nissa.sinks import JsonLines
from esper.simic.run.run_directory import cut_events, events_length

HEALTHY = Path(__file__).parents[1] / "recorded" / "healthy"
EVENTS = [decode(line) for line in (HEALTHY / "events.jsonl").read_bytes().splitlines()]
LINES = [encode(event) + b"\n" for event in EVENTS]
PART = 20_000
"""Bytes per part: the recorded run then has about a dozen."""


def written(tmp_path: Path, events: list[Event] = EVENTS, part: int = PART) -> Path:
    """A run directory to which a sink has written events."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_bytes((HEALTHY / "config.json").read_bytes())
    sink = JsonLines(run, part)
    for event in events:
        sink.write(event)
    sink.close()
    return run


def parts_in(run: Path) -> list[Path]:
    return sorted((run / "events").glob("*.parquet"))


def follow(run: Path) -> EventLog:
    """Read all events of a run as Sanctum does."""
    log = EventLog(run)
    while log.behind:
        log.poll()
    return log


def assert_whole(run: Path, events: list[Event] = EVENTS) -> None:
    """Every way of reading finds these events, in this order."""
    assert [event for _, event in EventReader(run)] == events
    assert list(EventReader(run).backwards()) == events[::-1]
    updates = [event for event in events if isinstance(event, PPOUpdateCompleted)]
    assert [event for _, event in EventReader(run, PPOUpdateCompleted)] == updates
    log = follow(run)
    assert (log.index.corrupt, log.index.unknown, log.cut_off) == (0, 0, 0)
    locations = log.index.locations[EpochCompleted]
    epochs = [event for event in events if isinstance(event, EpochCompleted)]
    assert [log.read(place) for place in locations] == epochs
    with Store([run]) as store:
        (row,) = store.query("SELECT count(*) AS n FROM ppo_update_completed").to_pylist()
        steps = store.query("SELECT round, step FROM epoch_completed").to_pylist()
    assert row["n"] == len(updates)
    assert [(s["round"], s["step"]) for s in steps] == [(e.round, e.step) for e in epochs]


def test_a_long_run_moves_its_events_to_parts_that_every_reader_reads(tmp_path: Path) -> None:
    run = written(tmp_path)
    assert len(parts_in(run)) > 5
    assert (run / "events.jsonl").stat().st_size < PART
    assert events_length(run) == sum(map(len, LINES))
    assert_whole(run)


def test_parts_keep_the_bytes_of_every_line(tmp_path: Path) -> None:
    """Even of lines that are no events, nor text."""
    run = written(tmp_path, EVENTS[:1])
    odd = [LINES[1], b"\xff\xfe?\n", b"\n", "ü".encode() + b"\xc3\n", LINES[2]]
    (run / "events.jsonl").write_bytes(LINES[0] + b"".join(odd))
    sinks.rotate(run, 1 << 20)
    with (run / "events.jsonl").open("rb") as file:
        (part,) = parts.parts_of(run, file)
    found = parts.read_lines(part)
    assert [len(line) for line in found] == [len(line) for line in [LINES[0], *odd]]
    reader = EventReader(run)
    assert [event for _, event in reader] == [EVENTS[0], EVENTS[1], EVENTS[2]]
    assert reader.unreadable == 3
    reader = EventReader(run, PPOUpdateCompleted)
    assert (list(reader), reader.unreadable) == ([], 3)


@pytest.mark.parametrize(
    ("number", "rounds_done"), [(10**30, None), (2**63, None), (-(2**63) - 1, 0)]
)
def test_numbers_of_any_size_neither_end_a_writer_nor_a_query(
    tmp_path: Path, number: int, rounds_done: int | None
) -> None:
    """In lines that were damaged on the disk."""
    run = written(tmp_path, EVENTS[:1])
    update = next(e for e in EVENTS if isinstance(e, PPOUpdateCompleted))
    odd = msgspec.structs.replace(update, round=number)
    line = encode(odd) + b"\n"
    with (run / "events.jsonl").open("ab") as file:
        file.write(line)
    for _ in range(2):
        with Store([run]) as store:
            (row,) = store.query("SELECT rounds_done FROM runs").to_pylist()
        assert row["rounds_done"] == rounds_done
        sinks.rotate(run, 1 << 20)
        with (run / "events.jsonl").open("ab") as file:
            file.write(line)
    assert [event for _, event in EventReader(run)] == [EVENTS[0], odd, odd]


def test_the_report_of_parts_is_that_of_the_lines(tmp_path: Path) -> None:
    own, plain = RunData(written(tmp_path)), RunData(HEALTHY)
    assert own.episode is not None
    assert plain.episode is not None
    assert own.episode.grown.tolist() == plain.episode.grown.tolist()
    assert own.outcomes["accuracy"].tolist() == plain.outcomes["accuracy"].tolist()
    assert own.lives.seed_counts == plain.lives.seed_counts


def test_a_query_keeps_lines_on_the_disk_while_it_lasts(tmp_path, monkeypatch) -> None:
    files: list[Path] = []
    original = queries.write_lines

    def write_lines(lines: Iterable[bytes], target: Path) -> None:
        files.append(target)
        original(lines, target)

    monkeypatch.setattr(queries, "write_lines", write_lines)
    assert_whole(written(tmp_path, part=1 << 30))
    assert files
    assert not any(target.exists() for target in files)


# --- a writer that dies, and readers beside it ------------------------------------------------


class Dies(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("step", range(10))
def test_a_writer_that_dies_while_it_moves_lines_loses_none(
    tmp_path: Path, monkeypatch, step: int
) -> None:
    """Three parts are written; it dies at one of the steps, and the next process continues."""
    run = written(tmp_path, part=1 << 30)
    size, left = sum(map(len, LINES)) // 3, [step]

    def dying(function: object) -> object:
        def replacement(*arguments: object, **named: object) -> object:
            if left[0] == 0:
                raise Dies
            left[0] -= 1
            return function(*arguments, **named)  # type: ignore[operator]

        return replacement

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "replace"), (os, "fsync"), (Path, "touch")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # nothing is tidied up
        with pytest.raises(Dies):
            sinks.rotate(run, size)
    assert_whole(run)
    sink = JsonLines(run, size)
    sink.write(EVENTS[-1])
    sink.close()
    assert_whole(run, [*EVENTS, EVENTS[-1]])


def test_lines_that_cannot_be_moved_stay_where_they_are(tmp_path, monkeypatch, capsys) -> None:
    failures = [3]
    original = sinks.rotate

    def rotate(run: Path, size: int) -> None:
        if failures[0]:
            failures[0] -= 1
            raise OSError(28, "No space left on device")
        original(run, size)

    monkeypatch.setattr(sinks, "rotate", rotate)
    run = written(tmp_path)
    assert capsys.readouterr().err.count("was not compressed (No space left on device)") == 3
    assert_whole(run)
    assert parts_in(run)


def test_a_reader_that_follows_a_run_reads_every_line_once(tmp_path: Path) -> None:
    """Lines move to parts, and a resumed run repeats some, between any two of its calls."""
    run = tmp_path / "run"
    run.mkdir()
    draws = random.Random(3)
    sink, log, seen = JsonLines(run, PART // 4), EventLog(run), list[bytes]()
    for event in EVENTS[:400]:
        sink.write(event)
        sink.flush()
        if draws.random() < 0.1:
            seen += log.new_lines(draws.choice((100, 5_000, 1 << 20)))
    sink.close()
    while log.behind:
        seen += log.new_lines(1 << 20)
    assert seen == [line.rstrip(b"\n") for line in LINES[: len(EVENTS[:400])]]
    assert log.resets == 0


@pytest.mark.parametrize("before", [True, False], ids=["before the list", "after the list"])
@pytest.mark.parametrize("empty", [True, False])
def test_lines_that_move_while_a_reader_lists_the_parts_are_read_once(
    tmp_path: Path, monkeypatch, before: bool, empty: bool
) -> None:
    """The reader has opened ``events.jsonl``, which may be empty; then lines come and move."""
    run = written(tmp_path)
    if empty:
        sinks.rotate(run, PART)
    original, calls = os.listdir, []

    def listdir(path: Path) -> list[str]:
        if calls:
            return original(path)
        calls.append(path)
        names = original(path)
        with (run / "events.jsonl").open("ab") as file:
            file.write(LINES[-1])
        sinks.rotate(run, PART)
        return original(path) if before else names

    monkeypatch.setattr(parts.os, "listdir", listdir)
    assert [event for _, event in EventReader(run)] == [*EVENTS, EVENTS[-1]]
    assert calls


# --- cutting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("died", [False, True])
def test_events_after_a_checkpoint_are_cut_wherever_they_lie(
    tmp_path: Path, monkeypatch, died: bool
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    run = written(whole)
    ends, end = [], 0
    for line in LINES:
        end += len(line)
        ends.append(end)
    first_rounds = [i for i, e in enumerate(EVENTS) if getattr(e, "round", 0) <= 1]
    for count in (1, 2, len(LINES) // 3, len(LINES) // 2, len(LINES) - 1, len(LINES)):
        copy = tmp_path / f"{count}"
        shutil.copytree(run, copy)
        if died:
            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", lambda *_, **__: None)
                cut_events(copy, ends[count - 1], 0)
        cut_events(copy, ends[count - 1], 0)
        starts = [e for e in EVENTS[count:] if getattr(e, "round", 1) == 0]
        expected = [*EVENTS[:count], *starts]
        assert [event for _, event in EventReader(copy)] == expected
        assert events_length(copy) == sum(len(encode(e)) + 1 for e in expected)
        assert not list(copy.rglob("*.draft"))
    assert first_rounds


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "flipped", "foreign"])
def test_a_damaged_part_costs_its_own_lines_alone(tmp_path, damage: str, capsys) -> None:
    run = written(tmp_path)
    third = parts_in(run)[2]
    start, end, *_ = third.stem.split("-")
    content = third.read_bytes()
    if damage == "gone":
        third.unlink()
    elif damage == "foreign":
        third.write_bytes(parts_in(run)[4].read_bytes())
    else:
        flipped = bytearray(content)
        flipped[len(content) // 3] ^= 4
        third.write_bytes({"cut": content[: len(content) // 2], "empty": b""}.get(damage, flipped))
    offset, left = 0, []
    for line, event in zip(LINES, EVENTS, strict=True):
        if not int(start) <= offset < int(end):
            left.append(event)
        offset += len(line)
    reader = EventReader(run)
    assert [event for _, event in reader] == left
    assert reader.unreadable == 1
    assert list(EventReader(run).backwards()) == left[::-1]
    log = follow(run)
    assert log.index.corrupt == 1
    epochs = [event for event in left if isinstance(event, EpochCompleted)]
    assert [log.read(place) for place in log.index.locations[EpochCompleted]] == epochs
    assert RunData(run).unreadable == 1
    with Store([run]) as store:
        (row,) = store.query("SELECT count(*) AS n FROM epoch_completed").to_pylist()
    assert row["n"] == len(epochs)
    assert capsys.readouterr().err.count("its events are left out") == 1


def test_files_that_are_no_parts_are_ignored(tmp_path: Path) -> None:
    run = written(tmp_path)
    for name in ("1.parquet", "notes.txt", "0-0-zz.parquet", "\udcff", "x" * 200):
        (run / "events" / name).write_text("?")
    assert_whole(run)
