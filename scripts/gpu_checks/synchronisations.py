"""Where the training thread waits for the device in a step and in an update."""

from collections.abc import Iterator

import profile_gpu_sync

from gpu_checks.place import TF32, Place, Row, computing
from gpu_checks.section import Found, rows_table


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per place that waits; one that is not documented is an error."""
    with computing(TF32):
        found = profile_gpu_sync.profiled(
            "digits_shift", place.size(64, 4), str(place.device), place.machine
        )
    for what, waits, calls in (("step", found.steps, found.length), ("update", found.update, 1)):
        yield {"of": what, "place": "all together", "waits": sum(waits.values()) / calls}
        for where, count in waits.most_common():
            row = {"of": what, "place": where, "waits": count / calls}
            reason = profile_gpu_sync.DOCUMENTED.get(where)
            yield row | ({"error": "not documented"} if reason is None else {"why": reason})
    yield {"of": "step", "place": "launches", "launches": found.launches}


def page(rows: list[Row], found: Found) -> str:
    """Return the places in Markdown."""
    return rows_table(("of", "place", "waits", "launches", "why"), rows)
