"""The event file, read while it is written."""

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from esper.karn.sanctum.log import LARGE_KINDS, EventLog
from esper.karn.sanctum.snapshot import Moment
from esper.leyline.events import EpisodeOutcome, EpochCompleted, TrainingStarted, decode, encode
from examples import examples
from karn.sanctum.events import a_round, finished, outcome, started, step, write
from karn.sanctum.screen import KINDS, RECORDED


def read_all(log: EventLog, limit: int = 2**24) -> EventLog:
    while log.poll(limit) or log.behind:
        pass
    return log


def test_a_missing_file_is_not_an_error(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    assert not log.poll()
    assert not log.behind
    assert log.index.lines == 0
    assert log.last_change() is None


def test_every_recorded_event_is_found_as_written_in_the_file() -> None:
    for kind in KINDS:
        log = read_all(EventLog(RECORDED / kind))
        lines = (RECORDED / kind / "events.jsonl").read_bytes().splitlines(keepends=True)
        whole = [decode(line) for line in lines if line.endswith(b"\n")]
        for wanted in LARGE_KINDS:
            found = [log.read(place) for place in log.index.locations[wanted]]
            assert found == [event for event in whole if isinstance(event, wanted)]
        for wanted in (TrainingStarted, EpisodeOutcome):
            assert log.index.until(wanted) == [e for e in whole if isinstance(e, wanted)]
        assert log.index.lines == len(whole)
        assert log.index.corrupt == log.index.unknown == 0


def test_a_half_written_line_is_read_once_complete(tmp_path: Path) -> None:
    line = encode(outcome(1)) + b"\n"
    run = write(tmp_path / "run", [started()], line[:40])
    log = read_all(EventLog(run))
    assert (log.index.lines, log.index.corrupt, log.cut_off) == (1, 0, 40)
    with (run / "events.jsonl").open("ab") as file:
        file.write(line[40:])
    assert log.poll()
    assert log.index.until(EpisodeOutcome) == [outcome(1)]
    assert log.cut_off == 0


def test_corrupt_and_unknown_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    future = b'{"event_type":"TELEPORTED","time":1.0}\n'
    garbage = b"\x00\xff{not json\n" + encode(outcome(1))[:50] + b"\n"
    run = write(tmp_path / "run", [started()], garbage + future + encode(outcome(2)) + b"\n")
    log = read_all(EventLog(run))
    assert (log.index.corrupt, log.index.unknown) == (2, 1)
    assert [event.round for event in log.index.until(EpisodeOutcome)] == [2]


def test_a_truncated_file_is_read_again(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [started(), *a_round(1), step(2, 1), step(2, 2)])
    log = read_all(EventLog(run))
    assert len(log.index.locations[EpochCompleted]) == 6
    write(run, [started(), *a_round(1), started(time=5.0)])
    assert log.poll()
    assert log.resets == 1
    assert len(log.index.locations[EpochCompleted]) == 4


def test_a_truncated_file_that_has_grown_longer_is_read_again(tmp_path: Path) -> None:
    before = [started(), *a_round(1), step(2, 1, time=20.0), step(2, 2, time=21.0)]
    again = [step(2, i, time=30.0 + i) for i in range(1, 5)]
    run = write(tmp_path / "run", before)
    log = read_all(EventLog(run))
    old = log.index.length
    assert Moment(log, log.index).step == before[-1]
    write(run, [started(), *a_round(1), *again, outcome(2)])
    assert (run / "events.jsonl").stat().st_size > old
    read_all(log)
    assert log.resets == 1
    fresh = read_all(EventLog(run))
    assert log.index == fresh.index
    assert Moment(log, log.index).episode(2) == again


@settings(max_examples=examples(25))
@given(st.integers(1, 40_000), st.integers(0, 2**32))
def test_reading_in_pieces_gives_the_same_index(limit: int, seed: int) -> None:
    order = random.Random(seed)
    events = (RECORDED / "interrupted" / "events.jsonl").read_bytes()
    whole = read_all(EventLog(RECORDED / "interrupted"))
    with tempfile.TemporaryDirectory() as folder:
        run, number_text = Path(folder), 0
        log = EventLog(run)
        while number_text < len(events):
            number_text += order.randrange(1, 30_000)
            (run / "events.jsonl").write_bytes(events[:number_text])
            read_all(log, limit)
        assert log.index == whole.index
        assert log.resets == 0


def test_a_line_longer_than_the_limit_is_read_completely(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [started(), outcome(1, [0.5] * 4000), finished(1)])
    log = read_all(EventLog(run), limit=100)
    assert log.index.lines == 3
    assert log.index.corrupt == 0
