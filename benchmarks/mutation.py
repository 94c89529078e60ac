"""Do the tests notice faults? One random fault at a time is put into a copy of the source.

    python benchmarks/mutation.py --write          # resumable, some hours on two cores
    python benchmarks/mutation.py --seed 7 --strata nissa tamiyo

The faults are drawn from the syntax of the whole source (``mutants.py``), as many from each
package. First the suite runs once under coverage, which tells for each line the tests that execute
it, also in the processes that they start. Then each fault is tried by these tests.
A fault is noticed if a test fails or takes longer than ``--seconds``. What is known is stored under
``--work`` for as long as the source stays as it is: a fault that was noticed is not tried again,
and one that was not is tried again when the tests of its line have changed.
"""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from coverage import CoverageData
from mutants import Mutant, draw
from reporting import kept, made_on, new_parser, publish, table

ROOT = Path(__file__).parent.parent
AT_LEAST = 0.9
"""The share of the faults of each package that the tests must notice."""
MOST_TESTS, MOST_SECONDS, FIRST_TESTS = 60, 120.0, 8
"""Tests that try one fault: how many, what they may take together, and how many of them are tried
before the others."""
FAILED, PASSED, NO_TESTS = 1, 0, 5
"""Exit statuses of pytest."""
MARKS = "not slow and not gpu"
PAGES = "tests/test_docs.py::"
"""Tests that compare pages with what modules define."""
NATIVE_TESTS = (
    "tests/native",
    "tests/tolaria/test_native.py",
    "tests/tolaria/test_training_oracle.py",
    "tests/tolaria/test_measure_oracle.py",
    "tests/tolaria/test_independence.py",
    "tests/tolaria/test_signals.py",
    "tests/tolaria/test_minibatches.py",
)
"""Tests of what is written in C++, whose lines coverage does not follow."""
COVERAGE = """[run]
source = esper, esper_lab
context = ${{PYTEST_CURRENT_TEST-}}
dynamic_context = test_function
patch = subprocess
parallel = true
data_file = {data}
"""

Lines = dict[str, dict[str, list[str]]]
"""Tests by file and line."""


def copy_repository(target: Path) -> None:
    """Copy what the tests need to ``target``, replacing an earlier copy."""
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", ".venv*", ".git", "runs", ".*_cache", "data")
    shutil.copytree(ROOT, target, ignore=ignored)


def source_digest() -> str:
    """A digest of the source, on which the draw depends."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix in (".py", ".h", ".cpp"):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Tests:
    """Tests in a copy of the repository, run by ``pytest_server.py``.

    Args:
        copy: the copy.
    """

    def __init__(self, copy: Path):
        self.copy, self._output = copy, copy.parent / f"{copy.name}-output.txt"
        server = [sys.executable, str(ROOT / "benchmarks/pytest_server.py")]
        # Not where Esper lies, so that only the copies have it.
        self._server = subprocess.Popen(
            server, cwd=copy.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fail(self, tests: list[str], seconds: float, **environment: str) -> bool:
        """Whether one of the tests fails, crashes or takes longer; the first ones are tried first.

        Raises:
            SystemExit: pytest could not run them, but for a fault at import.
        """
        for part in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
            if part and self._status(part, seconds, environment) != PASSED:
                return True
        return False

    def _status(self, tests: list[str], seconds: float, environment: dict[str, str]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        variables = {"PYTHONPATH": str(self.copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        request = {
            "copy": str(self.copy),
            "arguments": ["-q", "-x", "-p", "no:cacheprovider", "-m", MARKS, *tests],
            "environment": variables | environment,
            "output": str(self._output),
            "seconds": seconds,
        }
        print(json.dumps(request), file=self._server.stdin, flush=True)
        status = json.loads(self._server.stdout.readline())
        if status in (PASSED, FAILED) or status is None or status < 0:
            return PASSED if status == PASSED else FAILED
        output = self._output.read_text(errors="replace")
        if "Error" not in output and "short test summary" not in output:
            raise SystemExit(f"pytest cannot run the tests:\n{output[-2000:]}")
        return FAILED  # a fault at import: pytest cannot collect the tests


class Cover:
    """The tests that execute each line, from one run of every file of tests under coverage.

    Args:
        work: folder of what is known.
        copies: copies of the repository, one for each process.
    """

    def __init__(self, work: Path, copies: list[Path]):
        self._work, self._copies = work, copies
        files = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
        with ThreadPoolExecutor(len(copies)) as pool:
            parts = list(pool.map(self._part, files, copies * len(files)))
        self.seconds: dict[str, float] = {}
        self._tests: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for lines, seconds in parts:
            self.seconds |= seconds
            for file, tests_by_line in lines.items():
                for line, tests in tests_by_line.items():
                    self._tests[file][line].update(tests)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that try a mutant; empty if no test executes its line.

        What is computed once, at import or by a function that remembers, is executed before the
        tests that use it: these are the tests that execute a line with its name, or have it in
        their text. Those come first whose file is named as the mutant's is, or its folder, and of
        them the fastest.
        """
        if not mutant.path.endswith(".py"):
            return list(NATIVE_TESTS)
        tests = self._tests[mutant.path][str(mutant.line)]
        names = names_of_what_is_computed_once(_text(mutant.path), mutant.line)
        if names:
            tests = tests | self._tests_with(names)
        # Coverage does not see a process that ends at once, or is killed.
        stem = Path(mutant.path).stem
        tests = tests | {test for test in self.seconds if stem in _words(test.partition("::")[0])}
        if not tests & self.seconds.keys():
            # What a fixture executes belongs to no test.
            folder = Path(mutant.path).parent
            near = [lines for file, lines in self._tests.items() if Path(file).parent == folder]
            tests = {test for lines in near for each in lines.values() for test in each}
        # A context may also name a function of a test that is none itself.
        tests = tests & self.seconds.keys()
        words = _words(mutant.path) - {"src", "esper", "py"}

        def order(test: str) -> tuple[bool, bool, int, float]:
            file = test.partition("::")[0]
            likeness = len(words & _words(file))
            mentions = bool(names) and _mentions(names, _text(file))
            return not test.startswith(PAGES), not mentions, -likeness, self.seconds[test]

        ordered = sorted(tests, key=order)[:MOST_TESTS]
        totals = accumulate(self.seconds[test] for test in ordered)
        return [test for test, total in zip(ordered, totals, strict=True) if total < MOST_SECONDS]

    def _tests_with(self, names: set[str]) -> set[str]:
        """Tests that execute a line with one of ``names``, or whose file has one; and of pages."""
        tests = {
            test
            for test in self.seconds
            if test.startswith(PAGES) or _mentions(names, _text(test.partition("::")[0]))
        }
        for file, lines in self._tests.items():
            text = _text(file).splitlines()
            for line, executing in lines.items():
                if _mentions(names, text[int(line) - 1]):
                    tests |= executing
        return tests

    def _part(self, file: Path, copy: Path) -> tuple[Lines, dict[str, float]]:
        """Lines and seconds of one file of tests."""
        digest = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:8]
        name = "-".join((*file.with_suffix("").parts, digest))
        found = kept(self._work / "cover" / f"{name}.json", lambda: self._measure(file, copy, name))
        return found["lines"], found["seconds"]

    def _measure(self, file: Path, copy: Path, name: str) -> dict[str, Any]:
        folder = self._work.absolute() / "coverage" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        settings = folder / "settings.ini"
        settings.write_text(COVERAGE.format(data=folder / "data"))
        report = folder / "times.xml"
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest"]
        command += ["-q", "-p", "no:cacheprovider", "-m", MARKS, f"--junitxml={report}", str(file)]
        variables = {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=copy, env=os.environ | variables, capture_output=True, text=True
        )
        if done.returncode not in (PASSED, NO_TESTS):
            raise SystemExit(f"{file} fails without a fault:\n{done.stdout[-2000:]}")
        print(f"covered  {file}", flush=True)
        seconds: dict[str, float] = defaultdict(float)
        for case in ElementTree.parse(report).iter("testcase"):
            _, _, group = case.attrib["classname"].partition(f"{file.stem}.")
            # All tests of a class are tried together.
            test = f"{file}::{group or case.attrib['name'].partition('[')[0]}"
            seconds[test] += float(case.attrib["time"])
        lines = _lines(folder, copy, file)
        shutil.rmtree(folder)
        return {"lines": lines, "seconds": seconds}


def names_of_what_is_computed_once(source: str, line: int) -> set[str]:
    """What a line at the top of a module or class defines, or the cached function around it.

    Empty if the line is executed whenever a function is called.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body[0].lineno <= line:
                cached = any("cache" in ast.unparse(each) for each in node.decorator_list)
                return {node.name} if cached else set()
            # A default of a parameter.
            names = names if node.name.startswith("__") else {node.name}
        elif isinstance(node, ast.ClassDef):
            names = {node.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {n.id for each in targets for n in ast.walk(each) if isinstance(n, ast.Name)}
    return names


def _words(path: str) -> set[str]:
    """The words of a path."""
    return set(re.split(r"[/_.]", path))


@cache
def _text(file: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / file).read_text()


def _mentions(names: set[str], text: str) -> bool:
    """Whether a text has one of the names, as in Python or as a flag of a command."""
    words = "|".join(name.replace("_", "[-_]") for name in names)
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", text) is not None


def _lines(folder: Path, copy: Path, file: Path) -> Lines:
    """Tests by file and line, from the data that coverage wrote into ``folder``."""
    lines: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.glob("data*"):
        data = CoverageData(str(path))
        data.read()
        for source in data.measured_files():
            if not Path(source).is_relative_to(copy):  # a test copied the package elsewhere
                continue
            where = str(Path(source).relative_to(copy))
            for line, contexts in data.contexts_by_lineno(source).items():
                tests = {_test_of(context, file) for context in contexts}
                lines[where][str(line)] |= tests - {""}
    return {f: {n: sorted(tests) for n, tests in by.items()} for f, by in lines.items()}


def _test_of(context: str, file: Path) -> str:
    """The test of a context: ``module.test`` within pytest, its own name in a process of it."""
    match = re.search(r"::(\w+)", context) or re.search(r"\b(test\w*)$", context)
    return f"{file}::{match[1]}" if match else ""


def trial(mutant: Mutant, runner: Tests, tests: list[str], seconds: float) -> dict[str, Any]:
    """Whether the tests notice a mutant in a copy of the repository, and how long they took."""
    copy, begin, environment = runner.copy, time.monotonic(), {}
    path = copy / mutant.path
    source = path.read_bytes()
    if not mutant.path.endswith(".py"):
        cache = copy.parent / f"{copy.name}-native"
        shutil.rmtree(cache, ignore_errors=True)
        environment = {"ESPER_CACHE_DIR": str(cache), "ESPER_NATIVE_FLAGS": "-O0"}
    try:
        path.write_bytes(mutant.applied(source))
        killed = runner.fail(tests, seconds, **environment)
    finally:
        path.write_bytes(source)
    verdict = "killed" if killed else "survived" if tests else "not covered"
    return {"verdict": verdict, "seconds": time.monotonic() - begin}


def verdicts(
    mutants: list[Mutant], cover: Cover, work: Path, copies: list[Path], seconds: float
) -> list[dict[str, Any]]:
    """The verdict of each mutant, tried in as many processes as there are copies."""
    free = [Tests(copy) for copy in copies]

    def tried(mutant: Mutant) -> dict[str, Any]:
        runner = free.pop()
        try:
            name = hashlib.sha256(mutant.name.encode()).hexdigest()[:16]
            killed, tests = work / "mutants" / f"{name}.json", cover.tests_of(mutant)
            path = killed if killed.exists() else killed.with_stem(f"{name}-{_digest(tests)}")
            result = kept(path, lambda: trial(mutant, runner, tests, seconds))
            if result["verdict"] == "killed" and path != killed:
                path.rename(killed)
        finally:
            free.append(runner)
        print(f"{result['verdict']:11} {mutant.name} ({result['seconds']:.0f} s)", flush=True)
        return dict(result)

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(tried, mutants))


def _digest(tests: list[str]) -> str:
    """A digest of the files of ``tests``, and of which they are."""
    files = sorted({test.partition("::")[0] for test in tests})
    texts = [path.read_bytes() for file in files if (path := ROOT / file).is_file()]
    return hashlib.sha256(b"".join([repr(tests).encode(), *texts])).hexdigest()[:8]


def main() -> int:
    """Try the mutants; return 0 if the tests notice enough of each package's."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/mutation"))
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the draw")
    parser.add_argument("--count", type=int, default=500, help="faults to draw")
    parser.add_argument("--strata", nargs="+", help="only these packages")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one fault's tests")
    arguments = parser.parse_args()
    work = arguments.work / source_digest()
    seed = kept(work / "seed.json", lambda: arguments.seed)
    copies = [(work / f"copy-{job}").absolute() for job in range(arguments.jobs)]
    for copy in copies:
        copy_repository(copy)
    mutants = [
        mutant
        for mutant in draw(ROOT, arguments.count, seed)
        if not arguments.strata or mutant.stratum in arguments.strata
    ]
    cover = Cover(work, copies)
    results = verdicts(mutants, cover, work, copies, arguments.seconds)
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for mutant, result in zip(mutants, results, strict=True):
        counts[mutant.stratum][result["verdict"]] += 1
        counts["all"][result["verdict"]] += 1
    shares = {name: by["killed"] / sum(by.values()) for name, by in counts.items()}
    rows = [
        (name, sum(by.values()), by["killed"], by["survived"], by["not covered"],
         f"{shares[name]:.0%}")
        for name, by in counts.items()
    ]  # fmt: skip
    left = [
        (f"`{mutant.name}`", result["verdict"])
        for mutant, result in zip(mutants, results, strict=True)
        if result["verdict"] != "killed"
    ]
    parts = (
        f"One random fault at a time in a copy of the source (seed {seed}); it is noticed if one "
        "of the tests that execute its line fails.",
        table(("package", "faults", "killed", "survived", "not covered", "share"), rows),
        f"Their tests ran for {sum(result['seconds'] for result in results) / 60:.0f} minutes.",
        "Faults that no test noticed:",
        table(("fault", "verdict"), left) if left else "none.",
        f"{made_on()}.",
    )
    publish("mutation", "Mutants", parts, arguments.write)
    return 0 if min(shares.values()) >= AT_LEAST else 1


if __name__ == "__main__":
    raise SystemExit(main())
