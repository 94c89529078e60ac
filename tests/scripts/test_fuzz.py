"""For any input, ``esper`` trains or refuses in one line; it never crashes or leaves files."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import fuzzing
import pytest
import torch
from fuzzing import Case

from esper.leyline.notices import LONGEST_MESSAGE
from esper.runtime.tasks import FAMILIES, SUITES, TASKS
from esper.scripts import report
from esper_lab import data
from processes import WATCHDOG, called
from small_runs import events_of
from support import own_blueprints

ROOT = Path(__file__).parents[2]
SIMPLE = [f"{fuzzing.flag(name)}={value}" for name, value in fuzzing.SMALL.items()]
CACHE = os.environ.get("ESPER_CACHE_DIR") or str(Path.home() / ".cache" / "esper")
"""Cache of compiled libraries: with a home of its own, each case would compile them again."""
LOCKS = {f"{run}/lock" for run in fuzzing.RUNS}
"""A directory is locked before its checkpoints are read; that may leave an empty file."""
EVERY_REPORT = 128
"""One report in so many is drawn: drawing takes longer than such a run."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: exit status, both streams, and the traceback of a crash."""

    code: object
    out: str
    err: str
    escaped: str = ""
    trained: bool = False


def execute(arguments: tuple[str, ...]) -> Outcome:
    """Run ``esper`` in this process, as the installed command does."""
    try:
        done = called(list(arguments), Path())
    except BaseException:
        return Outcome(None, "", "", traceback.format_exc())
    return Outcome(done.returncode, done.stdout, done.stderr)


def contents(place: Path) -> dict[str, str]:
    """Return digests of all files and the names of all directories below ``place``."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "directory"
        for path in place.rglob("*")
    }


def prepared(place: Path, run: Path, case: Case) -> None:
    """Prepare a directory for ``case`` with obstacles, and a complete run to resume."""
    place.mkdir()
    fuzzing.furnish(place, case)
    if "run" in case.arguments:
        shutil.copytree(run, place / "run")


def finished_runs(place: Path, before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the run directories that were made or changed; fails if one is incomplete."""
    changed = {name for name in after if after[name] != before.get(name)}
    runs = sorted({str(Path(name).parent) for name in changed if name.endswith("config.json")})
    for run in runs:
        path = place / run
        settings = json.loads((path / "config.json").read_text())["settings"]
        if settings["telemetry_level"] == "off":
            assert not (path / "events.jsonl").exists(), "off writes no events"
            continue
        last = events_of(path)[-1]
        assert last["event_type"] == "TRAINING_FINISHED"
        assert (last["status"], last["round"]) == ("finished", settings["rounds"])
    return runs


def check_outcome(case: Case, outcome: Outcome, place: Path, before: dict[str, str]) -> bool:
    """Return whether ``case`` trained; fails if it violates a guarantee."""
    after = contents(place)
    assert not outcome.escaped, "an exception"
    assert "Traceback" not in outcome.out + outcome.err, "a traceback"
    assert outcome.code in ((0, 2) if case.expected is None else (case.expected,)), "exit status"
    if outcome.code == 2:
        *notes, line = outcome.err.removesuffix("\n").split("\n")
        assert line.startswith("esper: "), "a message"
        assert line.isprintable(), "a message without control characters"
        assert len(line) < LONGEST_MESSAGE * 2, "a short message"
        assert all(n.startswith(("warning: ", "checkpoint: ")) for n in notes), "one message"
        assert not case.mentions or any(m in line for m in case.mentions), "names what is wrong"
        assert {n: d for n, d in after.items() if n not in LOCKS} == before, "writes nothing"
        return False
    runs = finished_runs(place, before, after)
    if "run directory: " not in outcome.out:
        assert not runs, "names its run"
        return False
    assert len(runs) == 1, "one run"
    return True


def undrawn(runs: list[Path], target: Path) -> Path:
    """In place of ``write_report``."""
    return target


def results(cases: list[Case], where: Path, run: Path, monkeypatch) -> list[Outcome]:
    """Return the outcomes of all cases; fails with every case that violates a guarantee."""
    draw_report = report.write_report
    outcomes, failures = [], []
    for index, case in enumerate(cases):
        place = where / str(index)
        prepared(place, run, case)
        before = contents(place)
        monkeypatch.chdir(place)
        monkeypatch.setenv("HOME", str(place))
        monkeypatch.setenv("ESPER_CACHE_DIR", CACHE)
        real = index % EVERY_REPORT == 0
        monkeypatch.setattr(report, "write_report", draw_report if real else undrawn)
        with own_blueprints(), patch.dict(TASKS), patch.dict(SUITES):
            outcome = execute(case.arguments)
        trained = False
        try:
            trained = check_outcome(case, outcome, place, before)
        except AssertionError as error:
            failures.append(told(index, case, outcome, str(error).splitlines()[0]))
        outcomes.append(Outcome(outcome.code, outcome.out, outcome.err, trained=trained))
        shutil.rmtree(place)
    assert not failures, f"{len(failures)} of {len(cases)}\n" + "\n".join(failures)
    return outcomes


def told(index: int, case: Case, outcome: Outcome, reason: str) -> str:
    """Describe a failed case so that it can be typed again."""
    lines = [f"--- case {index}: {reason}", "esper " + shlex.join(case.arguments)[:1000]]
    if case.content is not None:
        lines.append(f"settings.json: {case.content[:1000]!r}")
    lines.append(f"exit {outcome.code}, expected {case.expected}, mentioning {case.mentions}")
    return "\n".join([*lines, outcome.err[-1000:], outcome.escaped[-1500:]])


def assert_meaningful(cases: list[Case], outcomes: list[Outcome]) -> None:
    """The mix trains and refuses often enough, and covers every setting in both ways."""
    assert sum(o.trained for o in outcomes) >= 0.15 * len(cases)
    assert sum(o.code == 2 for o in outcomes) >= 0.4 * len(cases)
    pairs = list(zip(cases, outcomes, strict=True))
    for accepted in (True, False):
        met = {c.field for c, o in pairs if c.field and o.trained == accepted}
        missing = fuzzing.KINDS.keys() - met
        assert not missing, f"no case where {missing} is {'right' if accepted else 'wrong'}"


@pytest.fixture(scope="module", autouse=True)
def quick_cases() -> Iterator[None]:
    """Without what takes long: the interpreter of Triton, and the sequences of some families.

    These hold a ramp, since generating them takes seconds for each task.
    """

    def ramps(count: int) -> torch.Tensor:
        return torch.linspace(0.0, 1.0, count * data.LENGTH).view(count, data.LENGTH, 1, 1)

    def labels(count: int) -> torch.Tensor:
        return torch.arange(count) % data.CLASSES

    sizes = (data.TRAINING + data.VALIDATION, 1_000)
    splits = tuple(map(ramps, sizes)), tuple(map(labels, sizes))
    caches = data.mnist1d, data.mislabelled
    for cache in caches:
        cache.cache_clear()
    with (
        patch.object(data, "_generate", lambda *_: splits),
        patch.dict(os.environ, {"TRITON_INTERPRET": "0"}),
    ):
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A complete run of one round."""
    place = tmp_path_factory.mktemp("before")
    with patch.object(report, "write_report", undrawn):
        outcome = execute(("train", "ppo", *SIMPLE, "--telemetry-dir", str(place)))
    assert outcome.code == 0, outcome.err
    (path,) = place.iterdir()
    return path


MANY = 3 * len(fuzzing.KINDS)
"""Number of cases: a third is right and a third wrong, and each setting must be both once."""


@pytest.fixture
def judged(tmp_path: Path, run: Path, monkeypatch) -> Callable[[list[Case]], list[Outcome]]:
    return lambda cases: results(cases, tmp_path, run, monkeypatch)


@pytest.mark.parametrize(("written", "seed"), [(fuzzing.commands, 20), (fuzzing.configs, 21)])
def test_hundreds_of_command_lines_and_of_settings_files(judged, written, seed: int) -> None:
    cases = written(MANY, seed=seed)
    assert cases == written(MANY, seed=seed)
    assert_meaningful(cases, judged(cases))


def test_listings_of_tasks(judged) -> None:
    cases = fuzzing.listings(40, seed=24)
    for case, outcome in zip(cases, judged(cases), strict=True):
        names = case.arguments[1 : case.arguments.index("--plugin")] if case.expected == 0 else ()
        for name in names:
            family = name.removesuffix("_held_out")  # listed as a whole, not by its draws
            entries = (family,) if family in FAMILIES else SUITES.get(name, (name,))
            assert all(f"\n  {entry}\n" in outcome.out for entry in entries), name


@pytest.mark.parametrize("share", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_wrong_values_are_refused(judged, share: int) -> None:
    """Even one in nine cover every setting."""
    cases = fuzzing.every_wrong_value(seed=22)[::share]
    assert {case.field for case in cases} >= fuzzing.KINDS.keys()
    judged(cases)


def test_every_valid_value_works(judged) -> None:
    judged(fuzzing.every_named_value(seed=23))


OWN = ("--plugin", "own.py", "--task", "own")
REAL = (
    Case(("train", "ppo", *SIMPLE, *OWN, "--telemetry-dir", "[/x]\udcff"), 0),
    Case(("train", "ppo", "--config-json", "settings.json"), 2, ("JSON",), content=b"[" * 100_000),
    Case(("train", "ppo", "--\udcff\x1b[2J"), 2, ("--",)),
)


def test_another_process_gives_the_same_outcomes(
    tmp_path: Path, run: Path, judged, monkeypatch
) -> None:
    judged(list(REAL))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    started = []
    for index, case in enumerate(REAL):
        place = tmp_path / f"real {index}"
        prepared(place, run, case)
        before = contents(place)
        command = [sys.executable, "-m", "esper.scripts.main", *case.arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=place, stdout=pipe, stderr=pipe, env=os.environ)
        started.append((case, place, before, process))
    for case, place, before, process in started:
        out, err = (stream.decode() for stream in process.communicate(timeout=WATCHDOG))
        assert check_outcome(case, Outcome(process.returncode, out, err), place, before) == (
            case.expected == 0
        )
        if case.expected == 2:
            monkeypatch.chdir(place)
            assert execute(case.arguments).err == err
