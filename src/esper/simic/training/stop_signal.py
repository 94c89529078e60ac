"""SIGINT, SIGTERM and SIGHUP: the first ends a run after saving it.

A second SIGINT or SIGTERM ends it at once. A second SIGHUP does not: a terminal that is closed
often sends two, one from its shell and one from the kernel. Under nohup, SIGHUP stays ignored.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest(Exception):
    """A signal requested the end of the run."""


class StopSignal:
    """Records the first signal that requests the end of a run.

    Attributes:
        number: number of the signal received, None if there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def check(self) -> None:
        """Raise ``StopRequest`` if a signal was received."""
        if self.number is not None:
            raise StopRequest

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the first signal in ``number``, then restore the previous signal handlers.

        Does nothing outside the main thread, because Python delivers signals only there.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {code: signal.getsignal(code) for code in (signal.SIGINT, signal.SIGTERM)}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)

        def restore() -> None:
            for code, handler in before.items():
                signal.signal(code, handler)

        def note(number: int, frame: FrameType | None) -> None:
            self.number = number
            for code, handler in before.items():
                signal.signal(code, signal.SIG_IGN if code == signal.SIGHUP else handler)

        for code in before:
            signal.signal(code, note)
        try:
            yield
        finally:
            restore()
