"""The check of a GPU: its sections on the virtual device, and what it keeps when they go wrong."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"
VIRTUAL = "**VIRTUAL DEVICE: nothing here was measured on a GPU.**"

# The workload registers tasks of its own, in whatever process imports it.
pytestmark = pytest.mark.usefixtures("scratch_register")


@pytest.fixture
def check(monkeypatch) -> Any:
    """The script and its modules, as where it is started."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("tests", "benchmarks", "scripts"):
        monkeypatch.syspath_prepend(ROOT / folder)
    names = ("files", "paths", "place", "processes", "results", "section", "sections")
    parts = {name: importlib.import_module(f"gpu_checks.{name}") for name in names}
    return SimpleNamespace(script=importlib.import_module("gpu_check"), **parts)


# --- the whole script -----------------------------------------------------------------------------


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The script without anything but the checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def checked(output: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The page and the sections of a run on the virtual device that must succeed."""
    done = run("--virtual", "--output", str(output), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (output / "gpu_check.md").read_text()
    content = json.loads((output / "gpu_check.json").read_text())
    assert page.startswith("# GPU check (virtual)\n\n")
    assert VIRTUAL in page
    assert content["virtual"] is True
    for section in content["sections"].values():
        assert (section["status"], section["error"]) == ("done", None)
        assert section["rows"]
        assert section["title"] in page
    return page, content["sections"]


def test_a_sample_runs_on_the_virtual_device(tmp_path: Path) -> None:
    _, sections = checked(tmp_path / "new" / "page", "--sections", "convolutions")
    ways = {row["way"] for row in sections["convolutions"]["rows"]}
    assert len(ways) == 5
    assert len(sections["convolutions"]["rows"]) == 5 * 4


@pytest.mark.slow
def test_all_of_it_runs_on_the_virtual_device(tmp_path: Path, check: Any) -> None:
    page, sections = checked(tmp_path / "page")
    assert tuple(sections) == check.sections.NAMES
    assert f"torch {torch.__version__}" in page
    assert "does not depend on the number of environments" in page
    assert {row["precision"] for row in sections["heads"]["rows"]} == set(check.place.PRECISIONS)
    waits = {row["of"]: row["waits"] for row in sections["waits"]["rows"] if "waits" in row}
    assert waits.keys() == {"step", "update"}
    outcomes = [row["outcome"] for row in sections["tests"]["rows"]]
    assert outcomes == ["PASSED"]


def test_a_machine_without_a_gpu_is_refused_in_one_line(
    tmp_path: Path, check: Any, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "page")])
    assert check.script.main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no CUDA device; --virtual" in err
    assert list(tmp_path.iterdir()) == []


def test_a_section_that_does_not_exist_is_refused_in_one_line(
    tmp_path: Path, check: Any, capsys
) -> None:
    asked = argparse.Namespace(sections=["loop", "facts"], virtual=True, output=tmp_path / "page")
    assert check.script.check(asked, tmp_path) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("gpu_check: --sections: loop is unknown; there are ticket, ")
    assert list(tmp_path.iterdir()) == []


# --- what is kept ---------------------------------------------------------------------------------


def counted(rows: list[dict[str, Any]], found: Any) -> str:
    return f"{len(rows)} rows"


def section(
    check: Any, name: str = "one", page: Callable[..., str] = counted, measure: Any = None
) -> Any:
    return check.section.Section(name, name.title(), 1.0, measure, page)


def fake_script(tmp_path: Path, monkeypatch, check: Any, ends: str) -> Path:
    """Instead of the script, one that writes a row for ``--measure NAME`` and then ``ends``."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_check.py").write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "name, file = sys.argv[2], Path(sys.argv[4])\n"
        "file.with_suffix('.new').write_text('{\"rows\": [{\"x\": 1}]}')\n"
        "os.replace(file.with_suffix('.new'), file)\n"
        f"{ends}\n"
    )
    monkeypatch.setattr(check.processes, "ROOT", tmp_path)
    return tmp_path


def test_a_section_that_takes_too_long_is_cut_and_keeps_its_rows(
    tmp_path: Path, check: Any, monkeypatch
) -> None:
    ends = "if name == 'one': Path(sys.argv[4] + '.pid').write_text(str(os.getpid()))\n"
    fake_script(tmp_path, monkeypatch, check, ends + "time.sleep(600 * (name == 'one'))")
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(check.processes, "time", clock)
    output = tmp_path / "out"
    results = check.results.Results(output, virtual=True)
    slow = section(check)

    def progress(outcome: Any) -> None:
        results.put(slow, outcome)
        # A run that is killed now has the row, and says that the section did not end.
        kept = json.loads((output / "gpu_check.json").read_text())["sections"]["one"]
        assert (kept["status"], kept["rows"]) == ("running", [{"x": 1}])
        assert "**running**" in (output / "gpu_check.md").read_text()
        while not (tmp_path / "one.json.pid").exists():
            time.sleep(0.01)
        now[0] = 100.0

    outcome = check.processes.measured(slow, True, 50.0, tmp_path, progress)
    assert (outcome.status, outcome.rows) == ("cut", [{"x": 1}])
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "one.json.pid").read_text()), 0)
    results.put(slow, outcome)
    assert "**cut** after 100 s" in (output / "gpu_check.md").read_text()
    assert results.failed == []
    after = check.processes.measured(section(check, "two"), True, 50.0, tmp_path, progress)
    assert after.status == "done"


def test_a_crash_is_recorded_the_next_section_runs_and_the_exit_status_is_1(
    tmp_path: Path, check: Any, monkeypatch, capsys
) -> None:
    ends = "print('last words', flush=True)\nif name == 'one': os.kill(os.getpid(), 9)"
    fake_script(tmp_path, monkeypatch, check, ends)
    monkeypatch.setattr(check.sections, "SECTIONS", (section(check), section(check, "two")))
    monkeypatch.setattr(check.sections, "NAMES", ("one", "two"))
    output = tmp_path / "page"
    given = argparse.Namespace(sections=None, virtual=True, output=output, minutes=None)
    assert check.script.check(given, tmp_path) == 1
    found = json.loads((output / "gpu_check.json").read_text())["sections"]
    assert {name: part["status"] for name, part in found.items()} == {
        "one": "failed",
        "two": "done",
    }
    assert found["one"]["rows"] == [{"x": 1}]
    assert found["one"]["error"] == f"the process ended with {-signal.SIGKILL}:\nlast words\n"
    assert "last words" in capsys.readouterr().err


@pytest.fixture
def elsewhere(check: Any, monkeypatch) -> None:
    """Sections are measured on no device at all."""

    @check.place.contextmanager
    def entered(virtual: bool) -> Iterator[Any]:
        yield check.place.Place(torch.device("cpu"), None)

    monkeypatch.setattr(check.processes, "entered", entered)


@pytest.mark.usefixtures("elsewhere")
def test_a_failing_section_writes_its_rows_and_its_traceback(tmp_path: Path, check: Any) -> None:
    def broken(place: Any) -> Iterator[dict[str, Any]]:
        yield {"x": float("nan")}
        raise ValueError("a typo")

    file = tmp_path / "one.json"
    assert check.processes.measure(section(check, measure=broken), True, file) == 1
    content = json.loads(file.read_text())
    assert content["rows"] == [{"x": "nan"}]
    assert content["error"].startswith("Traceback")
    assert "a typo" in content["error"]


@pytest.mark.usefixtures("elsewhere")
def test_a_failing_row_does_not_end_its_section_and_too_little_memory_is_no_failure(
    tmp_path: Path, check: Any
) -> None:
    def raising(error: Exception) -> Callable[[], Any]:
        def call() -> Any:
            raise error

        return call

    full, typo = torch.OutOfMemoryError("CUDA out of memory.\nMore"), ValueError("a typo")

    def rows(errors: list[Exception]) -> Callable[[Any], Iterator[Any]]:
        return lambda place: (check.place.attempted({"n": 1}, raising(e)) for e in errors)

    file = tmp_path / "one.json"
    assert check.processes.measure(section(check, measure=rows([full])), True, file) == 0
    assert json.loads(file.read_text())["rows"] == [
        {"n": 1, "note": "out of memory: CUDA out of memory."}
    ]
    assert check.processes.measure(section(check, measure=rows([typo, full])), True, file) == 1
    first, second = json.loads(file.read_text())["rows"]
    assert "a typo" in first["error"]
    assert "note" in second


def test_a_page_that_cannot_be_written_is_a_failure_and_the_rows_stay(
    tmp_path: Path, check: Any
) -> None:
    results = check.results.Results(tmp_path / "page", virtual=False)
    outcome = check.processes.Outcome("done", 1.0, [{"x": 1}])
    results.put(section(check, page=lambda rows, found: rows[0]["y"]), outcome)
    assert results.failed == ["one"]
    found = json.loads((tmp_path / "page" / "gpu_check.json").read_text())
    assert found["virtual"] is False
    assert "KeyError" in found["sections"]["one"]["error"]
    assert found["sections"]["one"]["rows"] == [{"x": 1}]
    assert VIRTUAL not in (tmp_path / "page" / "gpu_check.md").read_text()


IDENTITY = {
    "ticket": {"head": "op", "gradient norms": [0.1, 0.2], "on the screen": "0.2000"},
    "named": {"test": "integration/test_sanctum_head_gradients.py::test_x", "outcome": "FAILED"},
    "streaming": {"envs": 16, "training images": "page-locked"},
    "commands": {"command": "python x", "seconds": 1.0, "exit status": 0, "output": "done"},
    "tests": {"test": "test_cuda.py::test_x", "outcome": "FAILED"},
    "waits": {"of": "step", "place": "a.py:b", "waits": 1.0},
    "launches": {"envs": 64, "slots with seeds": 1},
    "heads": {"precision": "TF32"},
    "accuracy": {"seed": 1, "dtype": "bfloat16"},
    "facts": {"what": "torch", "value": None},
    "loops": {"envs": 64, "precision": "TF32", "captured": True},
    "convolutions": {"networks": 64, "precision": "TF32", "way": "grouped"},
    "amp": {"envs": 256, "precision": "bfloat16"},
    "telemetry": {"envs": 64, "ms a step": {"off": 1.0, "normal": 1.0, "debug": 2.0}},
    "updates": {"who": "esper", "what": "update"},
    "memory": {"task": "digits_shift", "precision": "TF32", "envs": 64},
}


def test_every_section_writes_rows_that_failed_or_did_not_fit(check: Any) -> None:
    assert tuple(IDENTITY) == check.sections.NAMES
    for part in check.sections.SECTIONS:
        row = IDENTITY[part.name]
        for more in ({}, {"error": "Traceback"}, {"note": "out of memory"}):
            assert part.page([row | more], {part.name: [row | more]})


def test_throughput_is_compared_with_tf32_of_the_same_loop(check: Any) -> None:
    loops = importlib.import_module("gpu_checks.loops")
    speeds = {"float32": 1.0, "TF32": 2.0, "bfloat16": 3.0}
    rows = [
        {"envs": 64, "captured": True, "precision": name, "steps a second": value}
        for name, value in speeds.items()
    ]
    assert loops.throughput(rows) == [(64, True, 1.5, None, 2.0)]


def test_the_outcome_of_a_test_is_read_whatever_its_name(check: Any) -> None:
    pattern = importlib.import_module("gpu_checks.gpu_tests").OUTCOME
    line = "tests/test_cuda.py::test_a[real-{'amp_dtype': 'float16'}] PASSED      [ 10%]"
    name = "tests/test_cuda.py::test_a[real-{'amp_dtype': 'float16'}]"
    found = pattern.match(line)
    assert found is not None
    assert found.groups() == (None, None, name, "PASSED")
    found = pattern.match(f"[gw1] [ 10%] PASSED {name}")
    assert found is not None
    assert found.groups() == ("PASSED", name, None, None)
    assert pattern.match("FAILED tests/test_cuda.py::test_a - assert 1 == 2") is None


def test_wheels_beside_the_checkout_are_importable(tmp_path: Path, check: Any, monkeypatch) -> None:
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("module_of_a_wheel.py", "VALUE = 3\n")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    check.paths.prepare(tmp_path / "wheels", tmp_path / "place")
    assert importlib.import_module("module_of_a_wheel").VALUE == 3
    entries = os.environ["PYTHONPATH"].split(os.pathsep)
    assert entries[-2:] == [str(tmp_path / "place"), "/elsewhere"]
    assert str(ROOT / "src") in entries
    del sys.modules["module_of_a_wheel"]


def test_a_section_whose_needs_are_missing_says_which_and_the_next_one_runs(
    tmp_path: Path, check: Any, monkeypatch
) -> None:
    fake_script(tmp_path, monkeypatch, check, "")
    needy = check.section.Section("one", "One", 1.0, None, counted, ("os", "absent_module"))
    monkeypatch.setattr(check.sections, "SECTIONS", (needy, section(check, "two")))
    monkeypatch.setattr(check.sections, "NAMES", ("one", "two"))
    given = argparse.Namespace(sections=None, virtual=True, output=tmp_path / "page", minutes=None)
    assert check.script.check(given, tmp_path) == 0
    page = (tmp_path / "page" / "gpu_check.md").read_text()
    assert "**skipped:** needs absent_module." in page
    found = json.loads((tmp_path / "page" / "gpu_check.json").read_text())["sections"]
    assert [part["status"] for part in found.values()] == ["skipped", "done"]


def test_only_sections_that_time_nothing_run_at_the_same_time(check: Any) -> None:
    timed, untimed = (
        section(check),
        check.section.Section("two", "Two", 2.0, None, counted, (), False),
    )
    assert [s.sections for s in check.section.in_stages([timed, untimed], True)] == [
        (untimed,), (timed,),
    ]  # fmt: skip
    assert [s.sections for s in check.section.in_stages([timed, untimed], False)] == [
        (timed,), (untimed,),
    ]  # fmt: skip


def test_the_sections_take_less_than_nine_minutes(check: Any) -> None:
    stages = check.section.in_stages(check.sections.SECTIONS, together=True)
    assert [len(stage.sections) for stage in stages][:2] == [8, 1]
    assert sum(stage.seconds for stage in stages) <= 9 * 60 * check.script.MARGIN
    assert len(set(check.sections.NAMES)) == len(check.sections.SECTIONS)


def test_a_claim_is_judged_by_pairs_of_rows(check: Any) -> None:
    claims = importlib.import_module("gpu_checks.claims")
    rows = [
        {"precision": name, "envs": envs, "captured": True, "step, ms": step}
        for name, envs, step in (("TF32", 64, 1.0), ("float32", 64, 2.0), ("TF32", 4096, 900.0))
    ]

    def verdicts(found: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
        lines = claims.page(found).splitlines()[2:]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return {text: verdict for _, text, verdict in cells}

    assert set(verdicts({}).values()) == {"not shown"}
    assert verdicts({"loops": rows})["TF32 faster than float32"] == "shown"
    rows[0]["step, ms"] = 3.0
    assert verdicts({"loops": rows})["TF32 faster than float32"] == "**failed**"
    named = [{"test": "a::with_amp[real]", "outcome": "PASSED"}, {"test": "b", "outcome": "FAILED"}]
    of_tests = verdicts({"named": named})
    assert of_tests["AMP in updates without NaN"] == "shown"
    assert of_tests["its four tests"] == "**failed**"
    ticket = [{"head": "op", "error": "op: [nan]"}]
    text = "the acceptance command: finite gradient norms of all heads in Sanctum"
    assert verdicts({"ticket": ticket})[text] == "**failed**"
