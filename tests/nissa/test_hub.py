"""The hub: order, levels, failing and slow sinks, and dropped steps."""

import threading
import time
from pathlib import Path

import pytest

from esper.karn.store import read_events
from esper.leyline.events import (
    CheckpointSaved,
    EpochCompleted,
    Event,
    PPOUpdateCompleted,
    SeedPruned,
    TelemetryDropped,
    TrainingFinished,
)
from esper.nissa import hub
from esper.nissa.hub import Hub
from esper.nissa.sinks import JsonLines
from processes import WATCHDOG


class Kept:
    """A sink that keeps its events and writes only while its gate is open."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.waits = threading.Event()

    def write(self, event: Event) -> None:
        self.waits.set()
        assert self.gate.wait(WATCHDOG)
        self.events.append(event)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def update(number: int) -> PPOUpdateCompleted:
    return PPOUpdateCompleted(time=1.0, round=number, update=number, metrics={"i": number})


def pruned(step: int) -> SeedPruned:
    return SeedPruned(time=0, round=1, step=step, environment=[], slot=[], blueprint=[])


def test_the_hub_keeps_order_and_writes_only_the_kinds_of_its_level(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    hub = Hub([JsonLines(tmp_path)], "minimal")
    for i in range(100):
        hub.emit(update(i))
        hub.emit(pruned(i))
        hub.emit_later(lambda i=i: [pruned(i)])
    hub.flush()
    assert len(path.read_bytes().splitlines()) == 100
    hub.close()
    assert [e.metrics["i"] for e in read_events(tmp_path, PPOUpdateCompleted)] == list(range(100))
    assert not list(read_events(tmp_path, SeedPruned))


def test_without_a_sink_no_events_are_wanted() -> None:
    hub = Hub([], "debug")
    assert not hub.wants(EpochCompleted)
    hub.emit(update(1))
    hub.close()


@pytest.mark.parametrize("method", ["write", "flush", "close"])
def test_a_failing_sink_is_removed_and_the_others_continue(capsys, method: str) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk on fire")

    broken, sound = Kept(), Kept()
    setattr(broken, method, fail)
    hub = Hub([broken, sound], "normal")
    for i in range(3):
        hub.emit(update(i))
        hub.flush()
    hub.close()
    assert sound.events == [update(i) for i in range(3)]
    assert sound.calls[-1] == "close"
    said = capsys.readouterr().err
    assert said.count("disk on fire") == said.count("\n") == 1


def test_a_sink_that_fails_is_closed_and_its_file_with_it(tmp_path: Path) -> None:
    broken, lines = Kept(), JsonLines(tmp_path)
    broken.write = lambda _: 1 / 0  # type: ignore[assignment, method-assign]
    hub = Hub([broken, lines], "normal")
    hub.emit(update(1))
    hub.close()
    assert broken.calls == ["close"]
    assert lines._file is not None
    assert lines._file.closed
    JsonLines(tmp_path).close()  # without an event there is no file to close


def test_an_event_reaches_a_live_reader_though_nobody_asks_for_a_flush() -> None:
    sink = Kept()
    hub = Hub([sink], "normal")
    hub.emit(update(1))
    end = time.monotonic() + WATCHDOG
    while sink.calls != ["flush"] and time.monotonic() < end:
        time.sleep(0.001)
    assert sink.calls == ["flush"]
    hub.close()


def test_events_wait_until_the_next_step_has_begun_unless_somebody_asks(monkeypatch) -> None:
    monkeypatch.setattr(hub, "EVENT_DELAY_SECONDS", 2.0 * WATCHDOG)
    sink = Kept()
    events = Hub([sink], "normal")
    events.emit(update(1))
    assert not sink.waits.wait(0.3)
    asker = threading.Thread(target=events.flush, daemon=True)
    asker.start()
    asker.join(WATCHDOG)
    assert not asker.is_alive()
    assert sink.events == [update(1)]
    sink.waits.clear()
    events.emit(update(2))
    assert not sink.waits.wait(0.3)
    events.close()
    assert sink.events == [update(1), update(2)]


def test_a_slow_sink_drops_steps_but_never_rounds(capsys) -> None:
    sink = Kept()
    sink.gate.clear()
    hub = Hub([sink], "normal", capacity=4)
    hub.emit(update(1))
    assert sink.waits.wait(WATCHDOG)  # the hub's thread holds the first event at the gate
    for step in range(10):
        hub.emit_later(lambda step=step: [pruned(step)])
    # Dropping a step does not wait: the gate is still shut.
    opener = threading.Timer(0.3, sink.gate.set)
    opener.start()
    hub.emit(CheckpointSaved(time=0, round=1, path="x"))  # waits for a place
    hub.flush()
    assert [e.step for e in sink.events if isinstance(e, SeedPruned)] == [0, 1, 2, 3]
    assert [type(e) for e in sink.events[-2:]] == [CheckpointSaved, TelemetryDropped]
    last_event = sink.events[-1]
    assert isinstance(last_event, TelemetryDropped)
    assert (last_event.round, last_event.steps, last_event.total, hub.drop_count) == (1, 6, 6, 6)

    hub.emit_later(lambda: [pruned(11)])
    hub.flush()
    assert sum(isinstance(e, TelemetryDropped) for e in sink.events) == 1, "nothing new to tell"
    hub.emit(TrainingFinished(time=0, round=1, status="finished"))
    hub.close()
    assert isinstance(sink.events[-1], TrainingFinished)
    assert capsys.readouterr().err.count("dropping steps") == 1


def test_steps_whose_events_cannot_be_made_are_reported_once_and_counted_in_total(capsys) -> None:
    def fail() -> list[Event]:
        raise ValueError("no such tensor")

    sink = Kept()
    hub = Hub([sink], "normal")
    for round_number, failures in ((1, 3), (2, 2)):
        for _ in range(failures):
            hub.emit_later(fail)
        hub.emit(update(round_number))
        hub.flush()
    hub.close()
    assert [type(e) for e in sink.events] == [PPOUpdateCompleted, TelemetryDropped] * 2
    reports = [event for event in sink.events if isinstance(event, TelemetryDropped)]
    assert [(each.round, each.steps, each.total) for each in reports] == [(1, 3, 3), (2, 2, 5)]
    assert hub.drop_count == 5
    assert capsys.readouterr().err.count("no such tensor") == 1


def test_a_sink_that_fails_while_stderr_cannot_be_written_does_not_stop_the_thread(
    monkeypatch,
) -> None:
    """Training waits for the thread, so its end would be that of training."""

    def fail(_: object) -> int:
        raise OSError(28, "No space left on device")

    kept, failing = Kept(), Kept()
    failing.write = fail  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr.write", fail)
        hub = Hub([failing, kept], "minimal")
        hub.emit(update(1))
        hub.flush()
        hub.close()
    assert kept.events == [update(1)]


def test_an_event_file_that_cannot_be_opened_is_a_sink_that_fails(tmp_path: Path, capsys) -> None:
    kept = Kept()
    hub = Hub([JsonLines(tmp_path / "missing"), kept], "minimal")
    hub.emit(update(1))
    hub.close()
    assert kept.events == [update(1)]
    assert capsys.readouterr().err.startswith("telemetry: JsonLines stopped: ")
