"""The hub receives events from training; its background thread writes them to the sinks."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Full, Queue

from esper.leyline.events import LEVELS, Event, RoundEvent, TelemetryDropped
from esper.leyline.notices import notice
from esper.nissa.sinks import Sink

EventFactory = Callable[[], Iterable[Event]]
"""A function that makes events when it is called."""

CAPACITY = 256
"""Maximum length of the queue. A step of 1,000 environments takes about 0.3 MB."""

EVENT_DELAY_SECONDS = 0.01
"""Seconds that the thread waits before it makes the events of a step. Meanwhile, the training
thread starts the next step and enters compiled code, which releases the GIL."""


class Hub:
    """Passes events to sinks on a background thread.

    A sink that fails is removed with one message on stderr; training continues. If the sinks are
    too slow, or the events of a step cannot be made, the hub drops that step: one message on stderr
    says so, and ``TelemetryDropped`` counts such steps. Events of rounds are never dropped.

    Args:
        sinks: receive the events.
        level: one of ``leyline.events.LEVELS``; determines which kinds of events are written.
        capacity: maximum length of the queue, in steps and events of rounds.
    """

    def __init__(self, sinks: Sequence[Sink], level: str, capacity: int = CAPACITY):
        self.kinds = LEVELS[level] if sinks else ()
        self.drop_count = 0
        self._drops_reported = self._round = 0
        self._sinks = list(sinks)
        self._queue: Queue[EventFactory | threading.Event | None] = Queue(capacity)
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nissa", daemon=True)
        self._thread.start()

    def wants(self, kind: type[Event]) -> bool:
        """Whether this level writes events of ``kind``; otherwise the caller need not make them."""
        return kind in self.kinds

    def emit(self, event: Event) -> None:
        """Hand over an event that must not be lost; block while the queue is full."""
        if type(event) in self.kinds:
            self._queue.put(lambda: (event,))

    def emit_later(self, make: EventFactory, lossless: bool = False) -> None:
        """Hand over a function that makes the events of a step; the hub's thread calls it.

        Returns at once. If the queue is full, the step is dropped and counted; if ``lossless``,
        block as ``emit`` does.
        """
        if lossless:
            self._queue.put(make)
            return
        try:
            self._queue.put_nowait(make)
        except Full:
            self._drop("the sinks cannot keep up")

    def flush(self) -> None:
        """Wait until everything handed over so far has reached the sinks."""
        done = threading.Event()
        self._hurry.set()
        self._queue.put(done)
        done.wait()
        self._hurry.clear()

    def close(self) -> None:
        """Write all waiting events, close the sinks and stop the thread."""
        self._hurry.set()
        self._queue.put(None)
        self._thread.join()

    def _drop(self, reason: str) -> None:
        self.drop_count += 1
        if self.drop_count == 1:
            text = f"telemetry: dropping steps ({reason}); TELEMETRY_DROPPED counts them"
            notice(text)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                self._flush()
                item.set()
                continue
            if self._queue.empty():
                self._hurry.wait(EVENT_DELAY_SECONDS)
            for event in self._make_events(item):
                if type(event) in self.kinds:
                    self._write(event)
            if self._queue.empty():
                self._each(lambda sink: sink.flush())
        self._flush()
        self._each(lambda sink: sink.close())

    def _make_events(self, make: EventFactory) -> list[Event]:
        try:
            return list(make())
        except Exception as error:
            # The thread must stay alive: training waits for it between rounds.
            self._drop(repr(error))
            return []

    def _write(self, event: Event) -> None:
        if isinstance(event, RoundEvent):
            self._round = event.round
        self._each(partial(_hand_over, event))

    def _flush(self) -> None:
        """Report newly dropped steps in an event, and flush the sinks."""
        total = self.drop_count
        if total > self._drops_reported:
            steps = total - self._drops_reported
            event = TelemetryDropped(time=time.time(), round=self._round, steps=steps, total=total)
            self._write(event)
            self._drops_reported = total
        self._each(lambda sink: sink.flush())

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:
                self._sinks.remove(sink)
                notice(
                    f"telemetry: {type(sink).__name__} stopped: {error}; training is not affected"
                )
                with suppress(Exception):
                    sink.close()


def _hand_over(event: Event, sink: Sink) -> None:
    sink.write(event)
