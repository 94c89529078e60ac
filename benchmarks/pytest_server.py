"""Runs tests on request, each in a process forked from one that has imported the libraries.

    python benchmarks/pytest_server.py

Importing PyTorch and the rest takes longer than most tests. A request is one line of JSON on stdin:
``copy`` (folder of a repository), ``arguments`` of pytest, ``environment``, ``output`` (a file) and
``seconds``. The answer is one line: the exit status of pytest, negative if a signal ended it, or
null if the tests took longer.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

# As tests/conftest.py sets it, which is too late once torch is imported.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
os.environ.setdefault("OMP_NUM_THREADS", "1")

LIBRARIES = (
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.export",
    "sklearn.ensemble",
    "sklearn.datasets",
    "scipy.stats",
    "matplotlib.figure",
    "duckdb",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "rich.progress",
    "textual.app",
    "gymnasium",
    "tyro",
    "msgspec",
    "jinja2",
)
"""What the tests import, if it is installed."""
POLL = 0.02
"""Seconds between two looks at a process."""


def child(request: dict[str, Any]) -> NoReturn:
    """Run the tests in this process and end it."""
    import pytest

    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.environ.update(request["environment"])
    os.chdir(request["copy"])
    sys.path[:0] = [f"{request['copy']}/src", request["copy"]]
    sys.dont_write_bytecode = True
    status = pytest.main(request["arguments"])
    sys.stdout.flush()
    os._exit(int(status))


def outcome(process: int, seconds: float) -> int | None:
    """The exit status of a process; its group has ended when this returns."""
    end, status = time.monotonic() + seconds, None
    while time.monotonic() < end:
        ended, code = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(POLL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    return status


def main() -> None:
    """Answer requests until stdin ends."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            child(request)
        print(json.dumps(outcome(process, request["seconds"])), flush=True)


if __name__ == "__main__":
    main()
