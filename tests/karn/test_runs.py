"""The status of a run follows from its files; a running run is never removed."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from esper.karn import runs as module
from esper.karn.runs import find_runs, inspect, remove
from esper.leyline.errors import UsageError
from esper.leyline.events import encode, try_decode
from esper.simic.run import run_directory
from esper.simic.run.run_directory import RunDirectory
from run_directories import finished, outcome, recorded_run, started, step, whole_round, write_run

RECORDED = Path(__file__).parents[1] / "recorded"

HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def process_that_holds_the_lock(run: Path) -> Iterator[subprocess.Popen]:
    """Start another process that holds the run's lock, as training does."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def checkpoint(run: Path, number: int) -> None:
    """Write a checkpoint of a round."""
    folder = run / "checkpoints" / f"{number:06d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("kind", "status", "rounds"),
    [
        ("healthy", "finished", (6, 6)),
        ("anomalous", "finished", (6, 6)),
        ("interrupted", "interrupted", (2, 100)),
        ("old_schema", "finished", (3, 3)),
    ],
)
def test_status_of_recorded_runs(kind: str, status: str, rounds: tuple[int, int]) -> None:
    info = inspect(RECORDED / kind)
    assert info.status == status
    assert (info.rounds_done, info.rounds_total) == rounds
    assert info.policy == "ppo"
    assert "digits_shift" in info.tasks
    files = [file for file in (RECORDED / kind).rglob("*") if file.is_file()]
    assert info.bytes == sum(len(file.read_bytes()) for file in files)


def test_a_run_is_running_while_a_process_holds_its_lock(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", 1)
    with process_that_holds_the_lock(run) as process:
        assert inspect(run).status == "running"
        assert inspect(run).resume is None
        process.kill()
        process.wait()
        assert inspect(run).status == "finished"


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([started(), *whole_round(1), finished(1, "interrupted")], "interrupted"),
        ([started(), *whole_round(1), finished(1, "failed")], "failed"),
        ([started(), *whole_round(1), step(2, 1)], "interrupted"),
        ([started(), step(1, 1)], "failed"),
        ([started(), *whole_round(1), finished(1), started(), step(2, 1)], "interrupted"),
        ([started(), outcome(1), finished(1), started(), outcome(2), finished(2)], "finished"),
    ],
    ids=["a signal", "reported", "killed", "killed early", "killed when resumed", "resumed"],
)
def test_status_of_a_run_without_a_process(tmp_path: Path, events: list, status: str) -> None:
    assert inspect(write_run(tmp_path / "run", events)).status == status


def test_without_events_the_status_follows_from_checkpoints(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], rounds=4)
    (run / "events.jsonl").unlink()
    assert inspect(run).status == "unknown"
    checkpoint(run, 2)
    info = inspect(run)
    assert (info.status, info.rounds_done, info.tasks) == ("interrupted", 2, ["a<b"])
    checkpoint(run, 4)
    assert inspect(run).status == "finished"


def test_gain_and_times_are_those_of_the_last_completed_round(tmp_path: Path) -> None:
    events = [started(), *whole_round(1), *whole_round(2), step(3, 1)]
    run = write_run(tmp_path / "run", events)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"event_type":"EPOCH_COMPL\xff')
    info = inspect(run)
    assert info.gain == pytest.approx(2.0)
    assert info.validation_gain == pytest.approx(10.0)
    assert info.rounds_done == 2
    assert (info.started, info.last_activity) == (1000.0, 1003.0)


def test_an_interrupted_run_with_a_checkpoint_can_be_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "my runs" / "run", [started(), *whole_round(1)], rounds=30)
    assert inspect(run).resume is None
    checkpoint(run, 1)
    assert inspect(run).resume == f"esper train ppo --resume '{run}' --rounds 30"
    whole = recorded_run(tmp_path / "whole", 1)
    checkpoint(whole, 1)
    assert inspect(whole).resume is None


def test_runs_are_found_at_any_depth_oldest_first(tmp_path: Path) -> None:
    young = write_run(tmp_path / "a" / "young", [started(time=2000.0)])
    old = write_run(tmp_path / "z" / "b" / "old", [started(time=1000.0)])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(old)
    assert find_runs(tmp_path) == [old, young]
    assert find_runs(old) == [old]
    with pytest.raises(UsageError, match="DIR"):
        find_runs(tmp_path / "nowhere")


def test_a_run_with_unreadable_settings_can_be_inspected(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", 2)
    for content in ("{", "[]", "[" * 100_000, '{"settings": {}}'):
        (run / "config.json").write_text(content)
        info = inspect(run)
        assert (info.rounds_done, info.tasks) == (2, ["a<b"])


def test_removing_a_run_keeps_the_targets_of_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    run = recorded_run(tmp_path / "run", 1)
    checkpoint(run, 1)
    (run / "link").symlink_to(outside)
    remove(run)
    assert not run.exists()
    assert (outside / "precious").exists()


def test_a_running_run_is_never_removed(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", 1)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with process_that_holds_the_lock(run), pytest.raises(BlockingIOError):
        remove(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_remains_of_a_failed_removal_are_still_a_run(tmp_path, monkeypatch) -> None:
    run = recorded_run(tmp_path / "run", 1)
    checkpoint(run, 1)

    def broken(path: Path) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(module.shutil, "rmtree", broken)
    with pytest.raises(OSError, match="on fire"):
        remove(run)
    assert find_runs(tmp_path) == [run]
    assert json.loads((run / "config.json").read_text())


# --- damaged, forged and changing directories -------------------------------------------------


def test_readers_never_keep_a_process_from_writing(tmp_path: Path, monkeypatch) -> None:
    """A reader's lock lasts for microseconds, in which a writer waits."""
    run = write_run(tmp_path / "run", [started(), *whole_round(1), finished(1)])
    with (run / "lock").open("ab") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        waited: list[float] = []

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                fcntl.flock(reader, fcntl.LOCK_UN)

        monkeypatch.setattr(run_directory.time, "sleep", sleep)
        RunDirectory(run).close()
    assert len(waited) == 3
    assert max(waited) <= 0.002


def test_a_run_that_a_process_reads_is_not_running(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(), *whole_round(1), finished(1)])
    with (run / "lock").open("ab") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert inspect(run).status == "finished"


@pytest.mark.parametrize("name", ["7x", "000007x", "٠٠٠٠٠٧", "-00001", "9" * 400, ".draft-000008"])
def test_odd_names_among_checkpoints_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", [started(), *whole_round(1)])
    checkpoint(run, 1)
    (run / "checkpoints" / name[:200]).mkdir()
    (run / "checkpoints" / name[:200] / "manifest.json").write_text("{}")
    assert inspect(run).rounds_done == 1


@pytest.mark.parametrize("settings", [[], None, 3, "text", {"rounds": "many"}, {"rounds": [1]}])
def test_settings_may_hold_anything(tmp_path: Path, settings: object) -> None:
    run = write_run(tmp_path / "run", [started(), *whole_round(1)])
    checkpoint(run, 1)
    (run / "config.json").write_text(json.dumps({"settings": settings}))
    info = inspect(run)
    assert (info.status, info.rounds_total, info.resume) == ("interrupted", None, None)


def test_files_that_vanish_are_not_counted(tmp_path: Path, monkeypatch) -> None:
    """Training removes old checkpoints while others look."""
    run = write_run(tmp_path / "run", [started(), *whole_round(1)])
    checkpoint(run, 1)
    checkpoint(run, 2)
    original = Path.stat

    def stat(path: Path, **named: bool):
        if "000002" in path.parts and path.name == "manifest.json":
            raise FileNotFoundError(2, "No such file or directory")
        return original(path, **named)

    monkeypatch.setattr(Path, "stat", stat)
    lstat = os.lstat
    monkeypatch.setattr(
        os, "lstat", lambda path, **n: lstat(f"{path}.gone" if "000002" in path else path, **n)
    )
    info = inspect(run)
    assert info.rounds_done == 1
    assert info.bytes > 0


def test_a_line_whose_lists_disagree_is_unreadable(tmp_path: Path) -> None:
    whole = json.loads(encode(outcome(1)))
    for name in ("utility", "task", "pruned", "test_utility"):
        assert try_decode(json.dumps(whole).encode()) is not None
        assert try_decode(json.dumps(whole | {name: whole[name][:1]}).encode()) is None, name
    older = {k: v for k, v in whole.items() if "test" not in k}
    assert try_decode(json.dumps(older).encode()) is not None
