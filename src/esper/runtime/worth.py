"""What growing is worth on each task, as a benchmark measured it once for all."""

from pathlib import Path

import msgspec

TABLE = Path(__file__).with_name("task_table.json")
"""Written by a benchmark and shipped with the package; absent while nothing is measured."""


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
    """What the best fixed schedule of a task gains over never growing.

    Attributes:
        gain: difference in utility, in points of a hundred.
        low: lower end of its interval.
        high: upper end of its interval.
        schedule: what grows where from when, in words.
    """

    gain: float
    low: float
    high: float
    schedule: str


def read_worth(table: Path = TABLE) -> dict[str, Worth]:
    """What growing is worth, by the name of the task; a task that is not there is not measured.

    The file holds utilities, accuracies and the interval of the gain as fractions.

    Raises:
        msgspec.ValidationError: the file is not as the benchmark writes it.
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
