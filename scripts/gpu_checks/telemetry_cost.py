"""What telemetry costs: whole loops at the levels off, normal and debug, in turns."""

from collections.abc import Iterator

import policy_update
from hot_path_workload import Workload
from reporting import table

from gpu_checks.place import TF32, Place, Row, computing
from gpu_checks.section import Found


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per number of environments."""
    for envs in place.size((64, 1024), (4,)):
        with computing(TF32) as precision:
            workload = Workload(
                envs=envs,
                episode_length=place.size(20, 4),
                max_batches=place.size(None, 1),
                batch_size=place.size(None, 4),
                device=str(place.device),
                precision=precision,
                threads=1,
                ppo_epochs=place.size(4, 1),
            )
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
