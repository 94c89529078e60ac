"""The tests that need a GPU, as pytest runs them."""

import re
import subprocess
import sys
from collections.abc import Iterator

from gpu_checks.paths import ROOT
from gpu_checks.place import Place, Row
from gpu_checks.section import Found, rows_table

OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
REAL = ("-m", "gpu")
SAMPLE = ("tests/test_cuda.py", "-m", "slow", "-k", "virtual and captured_updates and None")


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per test as soon as it has ended, then the report of those that failed."""
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "-v", "--tb=short", "-ra")
    command = [sys.executable, "-m", "pytest", *options, *place.size(REAL, SAMPLE)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            outcome = OUTCOME.match(line)
            if outcome is not None:
                yield {"test": outcome[1].removeprefix("tests/"), "outcome": outcome[2]}
    status = process.returncode
    if status:
        yield {"test": f"pytest ended with {status}", "error": "".join(said)}


def page(rows: list[Row], found: Found) -> str:
    """Return the number of tests by outcome, and those that did not pass."""
    outcomes = [row["outcome"] for row in rows if "outcome" in row]
    counts = ", ".join(f"{outcomes.count(name)} {name.lower()}" for name in sorted(set(outcomes)))
    others = [row for row in rows if row.get("outcome") != "PASSED"]
    text = f"{len(outcomes)} tests: {counts or 'none has ended'}."
    return text if not others else f"{text}\n\n{rows_table(('test', 'outcome'), others)}"
