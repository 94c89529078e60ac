"""The reader of event files: forwards, backwards and incrementally."""

from pathlib import Path

import pytest

from esper.leyline.errors import UsageError
from esper.leyline.events import EpochCompleted, Event, PPOUpdateCompleted, SeedEvent, decode
from esper.leyline.events.reader import EventReader

RECORDED = Path(__file__).parents[1] / "recorded"
KINDS = ("healthy", "anomalous", "interrupted", "old_schema")


def events_of(run: str) -> list[Event]:
    """The events of the complete lines of a recorded run."""
    lines = (RECORDED / run / "events.jsonl").read_bytes().splitlines(keepends=True)
    return [decode(line) for line in lines if line.endswith(b"\n")]


@pytest.mark.parametrize("run", KINDS)
def test_forward_backward_and_incremental_reading_agree(run: str) -> None:
    events = events_of(run)
    assert [event for _, event in EventReader(RECORDED / run)] == events
    for block in (7, 1000, 1 << 20):
        assert list(EventReader(RECORDED / run).backwards(block)) == events[::-1]
    reader, pieces = EventReader(RECORDED / run), []
    while reader.behind:
        pieces += reader.new_lines(1000)
    assert [decode(line) for line in pieces] == events
    assert reader.resets == 0


@pytest.mark.parametrize("run", KINDS)
@pytest.mark.parametrize("kind", [EpochCompleted, PPOUpdateCompleted, SeedEvent])
def test_reader_yields_only_the_wanted_kinds(run: str, kind: type[Event]) -> None:
    wanted = [event for event in events_of(run) if isinstance(event, kind)]
    assert [event for _, event in EventReader(RECORDED / run, kind)] == wanted


def test_unwanted_kinds_are_skipped_without_decoding(tmp_path: Path) -> None:
    whole = (RECORDED / "healthy" / "events.jsonl").read_bytes()
    broken = (
        b'{"event_type":"EPOCH_COMPLETED","time":\n',
        b'{"event_type":"PPO_UPDATE\xff\n',
        b"?\n",
    )
    (tmp_path / "events.jsonl").write_bytes(whole + b"".join(broken))
    for kinds, unreadable in (((), 3), ((EpochCompleted,), 2), ((PPOUpdateCompleted,), 1)):
        reader = EventReader(tmp_path, *kinds)
        assert list(reader)
        assert reader.unreadable == unreadable


def test_missing_event_file_is_an_error(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    with pytest.raises(UsageError, match="holds no events"):
        next(iter(reader))
    with pytest.raises(FileNotFoundError):
        reader.new_lines()
    assert not list(reader.backwards())
