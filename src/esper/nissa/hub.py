"""The hub: training hands it events, a background thread gives them to the sinks."""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from esper.leyline.events import LEVELS, Event, encode

Making = Callable[[], Iterable[Event]]
"""What makes events when it is called."""


class Sink(Protocol):
    """Somewhere events go."""

    def write(self, event: Event) -> None:
        """Take one event."""
        ...

    def flush(self) -> None:
        """Make sure that what was taken is kept."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class JsonLines:
    """Appends events to a file, one line each."""

    def __init__(self, path: Path):
        self._file = path.open("ab")

    def write(self, event: Event) -> None:
        self._file.write(encode(event) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Hub:
    """Passes events to sinks on a thread of its own.

    A sink that fails is dropped with one message on stderr; training goes on.

    Args:
        sinks: where events go.
        level: one of ``leyline.events.LEVELS``; other events are left out.
    """

    def __init__(self, sinks: Sequence[Sink], level: str):
        self.wanted = LEVELS[level]
        self._sinks = list(sinks)
        self._queue: SimpleQueue[Making | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="nissa", daemon=True)
        self._thread.start()

    def wants(self, kind: type[Event]) -> bool:
        """Whether this level writes events of ``kind``; saves the work of making them."""
        return kind in self.wanted

    def emit(self, event: Event) -> None:
        """Hand over one event; returns at once."""
        self.emit_later(lambda: (event,))

    def emit_later(self, make: Making) -> None:
        """Hand over what makes some events; it is called on the hub's thread."""
        self._queue.put(make)

    def flush(self) -> None:
        """Wait until everything emitted so far has reached the sinks."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Write what is left and stop."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                self._each(lambda sink: sink.flush())
                item.set()
                continue
            for event in self._made(item):
                if type(event) in self.wanted:
                    self._each(partial(_write, event))
            if self._queue.empty():
                self._each(lambda sink: sink.flush())
        self._each(lambda sink: sink.flush())
        self._each(lambda sink: sink.close())

    def _made(self, make: Making) -> list[Event]:
        try:
            return list(make())
        except Exception as error:
            # The thread must live on: training waits for it between rounds.
            print(f"telemetry: events were lost: {error!r}", file=sys.stderr)
            return []

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:
                self._sinks.remove(sink)
                print(f"telemetry: {type(sink).__name__} stopped: {error}", file=sys.stderr)


def _write(event: Event, sink: Sink) -> None:
    sink.write(event)
