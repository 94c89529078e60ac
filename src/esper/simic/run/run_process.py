"""One process of a run: signals that end it, its events, how it ends, and its checkpoints."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from esper.leyline.config import OutputConfig
from esper.leyline.disk import sync
from esper.leyline.events import CheckpointSaved, TrainingFinished
from esper.leyline.notices import notice
from esper.nissa.hub import Hub
from esper.nissa.sinks import run_sinks
from esper.simic.run.checkpoint import save, what_stays
from esper.simic.run.identity import Identity
from esper.simic.run.run_directory import RunDirectory
from esper.tamiyo.policy.features import FeatureNames


class StopRequest(Exception):
    """A signal requested the end of the run."""


class StopSignal:
    """SIGINT, SIGTERM and SIGHUP: the first ends a run after saving it.

    A second SIGINT or SIGTERM ends it at once. A second SIGHUP does not: a terminal that is closed
    often sends two, one from its shell and one from the kernel. Under nohup, SIGHUP stays ignored.

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


@dataclass(slots=True, kw_only=True)
class RunProcess:
    """What processes that act and that learn from records have in common.

    Attributes:
        directory: the run directory, locked by this process.
        stop: records whether a signal was received.
        identity: what checkpoints belong to.
        done: rounds or epochs that are complete, those of earlier processes included.
        status: how the process ends, as events say it.
        code: exit status.
        hub: receives the events.
    """

    directory: RunDirectory
    stop: StopSignal
    identity: Identity
    done: int = 0
    status: str = "finished"
    code: int = 0
    hub: Hub = field(init=False)

    @contextmanager
    def telemetry(self, output: OutputConfig) -> Iterator[None]:
        """Open the sinks of the run; its last event says how the process ended."""
        self.hub = Hub(run_sinks(self.directory.path, output), output.telemetry_level)
        try:
            yield
            self._emit_end(self.status)
        except (Exception, SystemExit) as error:
            self._emit_end("failed", repr(error))
            raise
        finally:
            self.hub.close()

    def _emit_end(self, status: str, message: str | None = None) -> None:
        end = TrainingFinished(time=time.time(), round=self.done, status=status, message=message)
        self.hub.emit(end)

    def interrupt(self) -> None:
        """End with the status of the signal that was received."""
        assert self.stop.number is not None
        self.status, self.code = "interrupted", 128 + self.stop.number

    def fail(self, line: str | None = None) -> None:
        """End with status 1, and say why if that was not said."""
        if line is not None:
            notice(f"esper: {line}")
        self.status, self.code = "failed", 1

    def save_checkpoint(
        self,
        unit: str,
        number: int,
        parts: dict[str, dict[str, Any]],
        events_bytes: int,
        keep: int,
        features: FeatureNames | None,
        best: bool = False,
    ) -> bool:
        """Save a checkpoint; whether that worked. If not, one line says so and earlier ones stay.

        Args:
            unit: what ``number`` counts, ``round`` or ``epoch``.
            number, parts, events_bytes, keep, features, best: see ``checkpoint.save``.
        """
        run = self.directory.path
        try:
            if self.directory.events.exists():
                sync(self.directory.events)
            path = save(run, number, parts, events_bytes, keep, self.identity, features, best)
        except OSError as error:
            notice(
                f"warning: checkpoint: {unit} {number} was not saved ({error.strerror}); "
                f"{what_stays(run)}"
            )
            return False
        relative = str(path.relative_to(run))
        self.hub.emit(CheckpointSaved(time=time.time(), round=number, path=relative))
        return True
