"""Do the tests notice faults? One fault at a time is put into the source.

    python benchmarks/mutation.py --write                     # resumable, about an hour and a half
    python benchmarks/mutation.py --modules ppo loss --survivors

The faults are in ``benchmarks/mutants``. They go into a copy of the repository, never into this
one. A fault is noticed if the tests fail, or take longer than ``--seconds``. Before its faults, the
tests of a table must pass as they are. What is known of a fault is kept under ``--work`` until its
file or its tests change. C++ is compiled without optimisation, in a cache of its own.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutants import AT_LEAST, Mutant, all_mutants
from reporting import made_on, new_parser, publish, table

ROOT = Path(__file__).parent.parent
FAILED, PASSED = 1, 0
"""Exit statuses of pytest; all others mean that the tests did not run."""


class CannotTest(Exception):
    """The tests of a mutant did not run as they should; the message says why."""


def copy_repository(target: Path) -> None:
    """Copy what the tests need to ``target``, replacing an earlier copy."""
    shutil.rmtree(target, ignore_errors=True)
    for name in ("src", "tests", "benchmarks", "scripts", "docs", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "results" if name == "docs" else "")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for path in ROOT.iterdir():
        if (
            path.is_file() and path.suffix in (".toml", ".md", ".txt", ".yml")
        ) or path.name == "Makefile":
            shutil.copy(path, target / path.name)


class Laboratory:
    """A copy of the repository, and what is known of mutants.

    Args:
        work: folder of both.
        seconds: limit of the tests of one mutant.
    """

    def __init__(self, work: Path, seconds: float):
        self.place, self.seconds = work.absolute() / "copy", seconds
        self._known_at = work.absolute() / "known.json"
        self.known: dict[str, Any] = (
            json.loads(self._known_at.read_text()) if self._known_at.exists() else {}
        )
        copy_repository(self.place)

    def test(self, mutant: Mutant) -> dict[str, Any]:
        """Whether the tests notice a mutant, and how long they took; from memory if known.

        Raises:
            CannotTest: its text is not in the file exactly once, or the tests did not run.
        """
        path = self.place / mutant.path
        original = path.read_text()
        if original.count(mutant.text) != 1:
            count = original.count(mutant.text)
            raise CannotTest(f"{mutant.path} has {mutant.text!r} {count} times")
        changed = original.replace(mutant.text, mutant.instead)
        key = self._key(mutant.tests, changed)
        if key not in self.known:
            self._check_clean(mutant)
            path.write_text(changed)
            try:
                begin = time.monotonic()
                code, told = self._run(mutant)
            finally:
                path.write_text(original)
            if code not in (FAILED, PASSED):
                raise CannotTest(f"{mutant.name}: pytest ended with {code}: {told[-300:]}")
            self._remember(key, {"killed": code == FAILED, "seconds": time.monotonic() - begin})
        return dict(self.known[key])

    def _check_clean(self, mutant: Mutant) -> None:
        """The tests pass without the fault."""
        key = self._key(mutant.tests, "clean " + (self.place / mutant.path).read_text())
        if key not in self.known:
            code, told = self._run(mutant)
            if code != PASSED:
                raise CannotTest(f"{' '.join(mutant.tests)} fail without a fault: {told[-600:]}")
            self._remember(key, {})

    def _run(self, mutant: Mutant) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not slow and not gpu", *mutant.tests]
        environment = os.environ | {
            "PYTHONPATH": str(self.place / "src"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if mutant.module == "native":
            cache = self.place.parent / "native"
            shutil.rmtree(cache, ignore_errors=True)
            environment |= {"ESPER_CACHE_DIR": str(cache), "ESPER_NATIVE_FLAGS": "-O0"}
        try:
            done = subprocess.run(
                command,
                cwd=self.place,
                env=environment,
                capture_output=True,
                text=True,
                timeout=self.seconds,
            )
        except subprocess.TimeoutExpired:
            return FAILED, "took too long"
        # A fault that ends the interpreter is noticed as well.
        return (FAILED if done.returncode < 0 else done.returncode), done.stdout

    def _key(self, tests: Sequence[str], text: str) -> str:
        digest = hashlib.sha256(text.encode())
        for test in tests:
            path = self.place / test
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def _remember(self, key: str, what: dict[str, Any]) -> None:
        self.known[key] = what
        draft = self._known_at.with_suffix(".draft")
        draft.write_text(json.dumps(self.known))
        draft.replace(self._known_at)


def main() -> int:
    """Run the mutants; return 0 if enough of each module are noticed."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/mutation"))
    parser.add_argument("--modules", nargs="+", help="only the mutants of these")
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    laboratory = Laboratory(arguments.work, arguments.seconds)
    chosen = [m for m in all_mutants() if not arguments.modules or m.module in arguments.modules]
    killed, tried, survivors, seconds, broken = Counter[str](), Counter[str](), [], 0.0, []
    for mutant in chosen:
        try:
            found = laboratory.test(mutant)
        except CannotTest as error:
            broken.append(str(error))
            print(f"BROKEN   {mutant.module}: {error}", flush=True)
            continue
        tried[mutant.module] += 1
        killed[mutant.module] += found["killed"]
        seconds += found["seconds"]
        if not found["killed"]:
            survivors.append(mutant)
        verdict = "killed  " if found["killed"] else "SURVIVED"
        print(f"{verdict} {mutant.module}: {mutant.name} ({found['seconds']:.0f} s)", flush=True)
    rows = [
        (m, tried[m], killed[m], tried[m] - killed[m], f"{killed[m] / tried[m]:.0%}") for m in tried
    ]
    total = sum(tried.values())
    rows.append(
        (
            "all",
            total,
            sum(killed.values()),
            len(survivors),
            f"{sum(killed.values()) / max(1, total):.0%}",
        )
    )
    left = [(m.module, m.name, f"`{m.path}`") for m in survivors]
    faults = [(m.module, m.name, " ".join(f"`{t}`" for t in m.tests)) for m in chosen]
    parts = (
        "One fault at a time in a copy of the source; it is noticed if the tests named beside it "
        "fail. The module `named` holds faults in files without a table of their own.",
        table(("module", "faults", "killed", "survived", "share"), rows),
        f"Their tests ran for {seconds / 60:.0f} minutes.",
        "Survivors:",
        table(("module", "fault", "file"), left) if left else "none.",
        "All faults:",
        table(("module", "fault", "tests"), faults),
        f"{made_on('other work on the machine')}.",
    )
    publish("mutation", "Mutants", parts, arguments.write and not broken)
    enough = all(killed[module] >= AT_LEAST * tried[module] for module in tried)
    return 0 if enough and not broken else 1


if __name__ == "__main__":
    raise SystemExit(main())
