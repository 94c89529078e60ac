"""What telemetry costs: whole loops at the levels off, normal and debug, in turns."""

from collections.abc import Iterator

import policy_update
from reporting import table

from gpu_checks.place import TF32, Place, Row, computing
from gpu_checks.section import Found


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per number of environments."""
    for envs in place.size((64, 1024), (4,)):
        with computing(TF32) as precision:
            workload = place.workload(envs, precision, 20)
            yield {
                "envs": envs,
                "ms a step": policy_update.telemetry(workload, "torch", place.size(4, 1)),
            }


def page(rows: list[Row], found: Found) -> str:
    """Return the levels in Markdown."""
    heads = ("environments", "telemetry", "ms per step", "against off")
    lines = [
        (row["envs"], *line)
        for row in rows
        for line in policy_update.telemetry_rows(row["ms a step"])
    ]
    return table(heads, lines)
