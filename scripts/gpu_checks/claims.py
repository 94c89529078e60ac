"""What the user's five documents ask of a GPU, and whether this page shows it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from reporting import table

from gpu_checks.gpu_tests import PASSED
from gpu_checks.place import FLOAT32, HALVES, TF32, Row
from gpu_checks.section import Found

SHOWN = {True: "shown", False: "**failed**", None: "not shown"}
STREAMING = "page-locked", "on the device"
OPTIMIZERS = "Adam, fused", "Adam, single tensors"
ACCURACY, STREAMED, TELEMETRY = 0.9, 1.25, 1.1
"""Bounds of the documents, and of us where they say *bounded* or *lower*."""


@dataclass(frozen=True)
class Claim:
    """A line of a document.

    Attributes:
        document: its number.
        text: what it asks.
        holds: whether the rows of the sections show it; None if they do not tell.
    """

    document: str
    text: str
    holds: Callable[[Found], bool | None]


def every(values: Iterable[bool]) -> bool | None:
    """Whether all hold; None if there are none."""
    given = list(values)
    return all(given) if given else None


def ended_well(found: Found, part: str) -> bool | None:
    """Whether the commands with ``part`` in them ended with exit status 0."""
    rows = [row for row in found.get("commands", []) if part in row["command"]]
    return every(row["exit status"] == 0 for row in rows)


def passed(found: Found, section: str, part: str = "") -> bool | None:
    """Whether the tests of a section whose names hold ``part`` have passed."""
    rows = [row for row in found.get(section, []) if part in row.get("test", "")]
    return every(row.get("outcome") == PASSED for row in rows)


def sums(rows: list[Row], key: str, figure: str, one: Any, other: Any) -> float | None:
    """Ratio of the sums of ``figure`` over the rows whose ``key`` is ``one`` or ``other``.

    Rows count in pairs of the same environments and capture: a section may have been cut.
    """
    values = {
        (row.get(key), row.get("envs"), row.get("captured")): float(row[figure])
        for row in rows
        if figure in row
    }
    pairs = [
        (value, values[other, *rest])
        for (name, *rest), value in values.items()
        if name == one and (other, *rest) in values
    ]
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs) if pairs else None


def below(ratio: float | None, bound: float) -> bool | None:
    """Whether a ratio is below a bound; None if there is none."""
    return None if ratio is None else ratio < bound


def without_error(found: Found, section: str) -> bool | None:
    """Whether no row of a section has an error; None if it has no rows."""
    return every("error" not in row for row in found.get(section, []))


def updates(found: Found) -> list[Row]:
    """Return the rows of the policy's update, without those of its rollout."""
    return [row for row in found.get("updates", []) if row.get("what") == "update"]


def half(found: Found) -> float | None:
    """Smallest time of a half precision relative to TF32, on CIFAR hosts, with one backend."""
    by_backend: dict[str | None, list[Row]] = {}
    for row in found.get("amp", []):
        by_backend.setdefault(row.get("backend"), []).append(row)
    ratios = [
        sums(rows, "precision", "step, ms", name, TF32)
        for rows in by_backend.values()
        for name in HALVES
    ]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


CLAIMS = (
    Claim("000", "the smoke command with `--use-amp`", lambda f: ended_well(f, "--use-amp")),
    Claim(
        "000",
        f"final accuracy with AMP at least {ACCURACY} of that without",
        lambda f: every(
            row["ratio of accuracy"] >= ACCURACY
            for row in f.get("accuracy", [])
            if "ratio of accuracy" in row
        ),
    ),
    Claim("000", "measurable speed-up by AMP", lambda f: below(half(f), 1.0)),
    Claim("000", "speed-up by AMP of 30 %, on CIFAR hosts", lambda f: below(half(f), 1.0 / 1.3)),
    Claim(
        "000",
        "snapshots say whether AMP is on",
        lambda f: passed(f, "tests", "learns_from_its_own_ratio"),
    ),
    Claim(
        "001",
        "compiled and captured update faster than eager",
        lambda f: below(sums(updates(f), "who", "ms", "esper, captured", "esper"), 1.0),
    ),
    Claim("001", "AMP in updates without NaN", lambda f: passed(f, "named", "with_amp")),
    Claim(
        "001",
        "TF32 faster than float32",
        lambda f: below(sums(f.get("loops", []), "precision", "step, ms", TF32, FLOAT32), 1.0),
    ),
    Claim(
        "001",
        "minibatches from page-locked memory: the same bits",
        lambda f: every(
            row["largest difference"] == 0
            for row in f.get("streaming", [])
            if "largest difference" in row
        ),
    ),
    Claim(
        "001",
        "minibatches from page-locked memory: a step takes less than 25 % longer",
        lambda f: below(
            sums(f.get("streaming", []), "training images", "step, ms", *STREAMING), STREAMED
        ),
    ),
    Claim(
        "001",
        "fused optimizer faster than single tensors",
        lambda f: below(sums(f.get("updates", []), "who", "ms", *OPTIMIZERS), 1.0),
    ),
    Claim("002", "warmup and decay on the device", lambda f: ended_well(f, "--lr-decay cosine")),
    Claim(
        "003",
        "the acceptance command: finite gradient norms of all heads in Sanctum",
        lambda f: without_error(f, "ticket"),
    ),
    Claim("003", "its four tests", lambda f: passed(f, "named")),
    Claim("004", "benchmark_hot_path.py", lambda f: ended_well(f, "benchmark_hot_path")),
    Claim("004", "profile_hot_path_operations.py", lambda f: ended_well(f, "profile_hot_path")),
    Claim("004", "profile_gpu_sync.py", lambda f: ended_well(f, "profile_gpu_sync")),
    Claim("004", "no undocumented wait for the device", lambda f: without_error(f, "waits")),
    Claim(
        "004",
        "telemetry adds less than 10 % to a step",
        lambda f: every(
            row["ms a step"]["normal"] < TELEMETRY * row["ms a step"]["off"]
            for row in f.get("telemetry", [])
            if "ms a step" in row
        ),
    ),
)


def page(found: Found) -> str:
    """Return every claim with *shown*, *not shown* or *failed*, as a table."""
    lines = [(one.document, one.text, SHOWN[one.holds(found)]) for one in CLAIMS]
    return table(("document", "asks", "on this page"), lines)
