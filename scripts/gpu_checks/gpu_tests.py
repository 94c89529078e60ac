"""The tests that need a GPU, as pytest runs them: first those that the ticket names."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from gpu_checks.paths import ROOT
from gpu_checks.place import Place, Row
from gpu_checks.section import Found, rows_table

RESULT = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
OUTCOME = re.compile(rf"^(?:\[gw\d+\] \[ *\d+%\] {RESULT} (\S+::.+)|(\S+::.+?) {RESULT}\b)")
"""A line of pytest: of its own, or with several processes (pytest-xdist)."""
REAL = ("-m", "gpu")
SAMPLE = ("tests/test_cuda.py", "-m", "slow", "-k", "virtual and captured_updates and None")
TICKET = ("tests/integration/test_sanctum_head_gradients.py", "-m", "")
"""The tests of the ticket, as it runs them."""
PASSED = "PASSED"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""With which cuBLAS promises equal bits, which tests compare."""


def measure_ticket(place: Place) -> Iterator[Row]:
    """Yield a row per test that the ticket names; one at a time, each compiles on its own."""
    kind, settings = place.size("real", "virtual"), place.size("", " and default and True")
    return outcomes(*TICKET, "-k", f"cuda and {kind}{settings}")


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per test, the ticket's left out."""
    several = ("-n", "6") if find_spec("xdist") is not None else ()
    return outcomes(*place.size((*REAL, f"--ignore={TICKET[0]}", *several), SAMPLE))


def outcomes(*selection: str) -> Iterator[Row]:
    """Yield a row per test as soon as it has ended, then the report of those that failed."""
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "-v", "--tb=short", "-ra")
    command = [sys.executable, "-m", "pytest", *options, *selection]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **DETERMINISTIC},
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            outcome = OUTCOME.match(line)
            if outcome is not None:
                name, result = outcome[2] or outcome[3], outcome[1] or outcome[4]
                yield {"test": name.strip().removeprefix("tests/"), "outcome": result}
    status = process.returncode
    if status:
        yield {"test": f"pytest ended with {status}", "error": "".join(said)}


def page(rows: list[Row], found: Found) -> str:
    """Return the number of tests by outcome, and those that did not pass."""
    results = [row["outcome"] for row in rows if "outcome" in row]
    counts = ", ".join(f"{results.count(name)} {name.lower()}" for name in sorted(set(results)))
    others = [row for row in rows if row.get("outcome") != PASSED]
    text = f"{len(results)} tests: {counts or 'none has ended'}."
    return text if not others else f"{text}\n\n{rows_table(('test', 'outcome'), others)}"
