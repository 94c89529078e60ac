"""Find the folders that ``esper.grow`` writes, and tell their state and what happened in them."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from esper.karn.runs import RunInfo, disk_usage, inspect, is_run, is_running, round_count
from esper.leyline.disk import read_sealed_json
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    POINTS,
    Event,
    GrowthEpochCompleted,
    GrowthFinished,
    GrowthStarted,
    Number,
)
from esper.leyline.events.reader import EventReader
from esper.leyline.run_files import EVENTS_LOCK

SETTINGS, PROGRESS, LOCK = "settings.json", "progress.pt", "lock"
"""What was asked for, where growth stands until it has ended, and the lock of its only writer."""
RESULT = "result.json"
KINDS = (GrowthStarted, GrowthEpochCompleted, GrowthFinished)


@dataclass(slots=True)
class Growth:
    """What the events of a folder tell.

    Attributes:
        start: the first event; None before it.
        curves: the epochs of each variant and try, by their number.
        end: the result; None before the end.
    """

    start: GrowthStarted | None = None
    curves: dict[tuple[str, int], dict[int, GrowthEpochCompleted]] = field(default_factory=dict)
    end: GrowthFinished | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """What the events tell, in their order."""
        growth = cls()
        for event in events:
            growth.add(event)
        return growth

    def add(self, event: Event) -> None:
        """Add the next event. An epoch that is repeated replaces all that came after it."""
        if isinstance(event, GrowthStarted):
            self.start, self.end = self.start or event, None
        elif isinstance(event, GrowthFinished):
            self.end = event
        elif isinstance(event, GrowthEpochCompleted):
            key = event.variant, event.attempt
            while key in self.curves and next(reversed(self.curves)) != key:
                self.curves.popitem()
            before = self.curves.get(key, {})
            self.curves[key] = {n: e for n, e in before.items() if n < event.epoch}
            self.curves[key][event.epoch] = event

    @property
    def last(self) -> GrowthEpochCompleted | None:
        """The last epoch."""
        curve = next(reversed(self.curves.values()), {})
        return next(reversed(curve.values()), None)

    def decisions(self) -> list[tuple[str, int, int, str]]:
        """Variant, try and epoch of each decision, with what was decided."""
        return [
            (*key, epoch, action)
            for key, curve in self.curves.items()
            for epoch, event in curve.items()
            for action in event.actions
        ]


def read_growth(folder: Path) -> Growth:
    """What the events of a folder tell now.

    Raises:
        UsageError: it has none.
    """
    return Growth.of(event for _, event in EventReader(folder, *KINDS))


def is_grown(path: Path) -> bool:
    """Whether ``path`` is a folder of ``esper grow --model`` or of ``esper.grow``."""
    try:
        if (path / EVENTS_LOCK).exists():
            return True
        contents = any((path / name).exists() for name in (PROGRESS, RESULT, LOCK))
        return contents and (path / SETTINGS).is_file()
    except OSError:
        return False  # not to be read by this user


def is_run_or_grown(path: Path) -> bool:
    """Whether ``path`` is the directory of a run, or of a grown network."""
    return is_run(path) or is_grown(path)


def inspect_either(path: Path) -> RunInfo:
    """The state of a run, or of a grown network."""
    return inspect(path) if is_run(path) else inspect_grown(path)


def inspect_grown(folder: Path, growth: Growth | None = None) -> RunInfo:
    """The state of a folder: what was asked for, and the gain on test and on validation.

    Args:
        folder: the folder.
        growth: what its events tell, if they were read.
    """
    if growth is None:
        growth = read_growth(folder) if (folder / "events.jsonl").exists() else Growth()
    start, last, end = growth.start, growth.last, growth.end
    status = "unknown"
    if any(is_running(folder, name) for name in (LOCK, EVENTS_LOCK)):
        status = "running"
    elif (folder / RESULT).exists() or (end is not None and not (folder / SETTINGS).exists()):
        status = "finished"
    elif start is not None or (folder / PROGRESS).exists():
        status = "interrupted"
    settings = _content(folder / SETTINGS)
    model, policy = settings.get("model"), settings.get("policy")
    times = []
    for path in folder.iterdir():
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return RunInfo(
        path=folder,
        status=status,
        policy=policy if isinstance(policy, str) else start.policy if start else None,
        tasks=[model] if isinstance(model, str) else [start.model] if start else [],
        rounds_done=last.epoch if last else 0,
        rounds_total=start.epochs if start else round_count(settings.get("epochs")),
        gain=_gain(end, end.test) if end else None,
        validation_gain=_gain(end, end.validation) if end else None,
        started=start.time if start else min(times, default=None),
        last_activity=max(times, default=None),
        bytes=disk_usage(folder),
        # The same command goes on; its flags are not all in the settings.
        resume=None,
    )


def _content(path: Path) -> dict[str, Any]:
    """The content of a sealed file; empty if it is missing or damaged."""
    try:
        return read_sealed_json(path)
    except (OSError, ValueError, UsageError):
        return {}


def _gain(end: GrowthFinished, figures: Sequence[Number]) -> float | None:
    """The figure of the grown network minus its twin's in points, if it is a share; else None."""
    if end.unit not in ("accuracy", "R²") or len(figures) < 2:
        return None
    return POINTS * (float(figures[0]) - float(figures[1]))
