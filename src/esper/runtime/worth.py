"""The gain from growing on each task, as measured by a benchmark."""

from pathlib import Path

import msgspec

TABLE = Path(__file__).with_name("task_table.json")
"""The benchmark's table, shipped with the package."""


class _Never(msgspec.Struct):
    utility: float
    accuracy: float


class _BestFixed(msgspec.Struct):
    schedule: str
    utility: float
    accuracy: float
    gain_interval: tuple[float, float]


class _Entry(msgspec.Struct):
    never: _Never
    best_fixed: _BestFixed


class _Table(msgspec.Struct):
    tasks: dict[str, _Entry]


class Worth(msgspec.Struct, frozen=True):
    """The gain of the best fixed schedule of a task over never growing.

    Attributes:
        gain: difference in utility on the validation split, in points.
        low: lower end of the gain's interval.
        high: upper end of the gain's interval.
        schedule: blueprint, slot, start, style and tempo of each seed, in words.
    """

    gain: float
    low: float
    high: float
    schedule: str


def read_worth(table: Path = TABLE) -> dict[str, Worth]:
    """Read the gain from growing on each task; tasks that were not measured are absent.

    The file holds utilities, accuracies and intervals of gains as fractions. If there is no file,
    the result is empty.

    Raises:
        msgspec.ValidationError: the file does not have the format of the benchmark.
    """
    if not table.exists():
        return {}
    entries = msgspec.json.decode(table.read_bytes(), type=_Table).tasks
    return {
        name: Worth(
            gain=100.0 * (entry.best_fixed.utility - entry.never.utility),
            low=100.0 * entry.best_fixed.gain_interval[0],
            high=100.0 * entry.best_fixed.gain_interval[1],
            schedule=entry.best_fixed.schedule,
        )
        for name, entry in entries.items()
    }
