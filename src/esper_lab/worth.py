"""The gain from growing on each task, as measured by a benchmark."""

from pathlib import Path

import msgspec

TABLE = Path(__file__).with_name("task_table.json")
"""The benchmark's table, shipped with the package."""


class Worth(msgspec.Struct, frozen=True):
    """The gain of the best fixed schedule of a task over the never-grow twin of the same recipe.

    The schedule was chosen on other hosts and other splits of the data.

    Attributes:
        gain: difference in utility on the test split, in points, and the ends of its 95 % interval.
        validation_gain: the same difference on the validation split, without an interval.
        schedule: blueprint, slot, start, style and tempo of each seed, in words.
        network: the best network that does not grow, trained with tuned rates.
        network_gain: its difference to the same twin on the test split.
    """

    gain: tuple[float, float, float]
    validation_gain: float
    schedule: str
    network: str
    network_gain: float


class _Table(msgspec.Struct):
    tasks: dict[str, Worth]


def read_worth(table: Path = TABLE) -> dict[str, Worth]:
    """Read the gain from growing on each task; tasks that were not measured are absent.

    If there is no file, the result is empty.

    Raises:
        msgspec.ValidationError: the file does not have the format of the benchmark.
    """
    if not table.exists():
        return {}
    return msgspec.json.decode(table.read_bytes(), type=_Table).tasks
