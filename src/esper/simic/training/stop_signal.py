"""SIGINT and SIGTERM: the first asks a run to end in good order, the second ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Listens for the signals that end a run.

    Attributes:
        number: of the signal that came, None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of the first signal; after it, signals do what they did before.

        Elsewhere than in the main thread nothing is listened for: Python gives signals to it alone.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {known: signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for known, handler in before.items():
                signal.signal(known, handler)

        def note(number: int, frame: FrameType | None) -> None:
            self.number = number
            restore()

        for known in before:
            signal.signal(known, note)
        try:
            yield
        finally:
            restore()
