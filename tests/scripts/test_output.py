"""Streams that are closed, full or gone: commands that compute go on, those that print say so."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from pseudo_terminal import OnTerminal
from rich.console import Console

from esper.karn.store import read_events
from esper.leyline import notices
from esper.leyline.events import TrainingFinished
from esper.scripts import output, report
from esper.scripts.entry import run_guarded
from esper.scripts.output import Output, OutputLost
from esper.simic.run.checkpoint import load_latest
from processes import ESPER, ran, refusal


def shell(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in which ``$ESPER`` is the command."""
    return ran(["bash", "-c", script], ESPER=" ".join(ESPER), **variables)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_that_prints_ends_with_one_line_where_it_cannot(unbuffered: str) -> None:
    run = shell("$ESPER --version > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert run.returncode == 2
    assert run.stderr == (
        "esper: stdout: cannot be written (No space left on device); make room or write elsewhere\n"
    )


def test_a_closed_pipe_ends_a_command_that_prints_without_a_word() -> None:
    run = shell("$ESPER --help | true; echo ${PIPESTATUS[0]}")
    assert run.stderr == ""
    assert run.stdout in ("141\n", "0\n")  # 0 if all was written before the reader went away


def test_closed_streams_are_not_given_to_files() -> None:
    """Else the first file that a command opens would be its stdout."""
    code = (
        "import os, sys; from esper.scripts.output import protect_streams; protect_streams(); "
        "found = [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]; print('lost'); "
        "terminal = sys.stdin.isatty() or sys.stdin.read(); sys.stderr.write('lost'); "
        "sys.stdout.flush(); os._exit(bool(terminal) or found != ['/dev/null'] * 3)"
    )
    assert shell(f'{sys.executable} -c "{code}" <&- >&- 2>&-').returncode == 0


@pytest.fixture
def pipe(monkeypatch):
    """An ``Output`` to a pipe, its reading end, and what it says on the other stream."""
    reader, writer = os.pipe()
    said: list[bytes] = []
    monkeypatch.setitem(output.NAMES, writer, "stdout")
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, text: said.append(text) if fd < 3 else write(fd, text)
    )
    yield Output(writer), reader, said
    os.close(writer)


def test_lasting_output_says_once_that_it_is_lost(pipe) -> None:
    stream, reader, said = pipe
    stream.lasts = True
    assert stream.write(b"read") == 4
    assert os.read(reader, 10) == b"read"
    os.close(reader)
    assert [stream.write(b"lost"), stream.write(b"as well")] == [4, 7]
    assert said == [b"esper: cannot write to stdout (Broken pipe); going on without this output\n"]


def test_other_output_raises_once(pipe) -> None:
    stream, reader, said = pipe
    os.close(reader)
    with pytest.raises(OutputLost) as lost:
        stream.write(b"lost")
    assert lost.value.broken_pipe
    assert stream.write(b"as the interpreter ends") == 23
    assert said == []


def test_a_full_pipe_that_does_not_block_is_waited_for(pipe) -> None:
    stream, reader, _ = pipe
    os.set_blocking(stream.fileno(), False)
    written = 0
    while written < 2**22:
        count = stream.write(bytes(2**16))
        written += count
        os.read(reader, count)
    filled = 0
    while (count := io.FileIO(stream.fileno(), "wb", closefd=False).write(bytes(4096))) is not None:
        filled += count
    waited = []

    def wait(*_: object) -> None:
        waited.append(os.read(reader, filled))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output.select, "select", wait)
        assert stream.write(b"whole") == 5
    assert len(waited) == 1
    os.close(reader)


def test_a_notice_never_raises(monkeypatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    for stream in (Full(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        notices.notice("lost")


def test_a_notice_is_one_line_without_control_characters(capsys) -> None:
    notices.notice("a\x1b[2J\nb\udcff")
    assert capsys.readouterr().err == "a\\x1b[2J\\nb\\udcff\n"


@pytest.mark.parametrize(("code", "reported"), [(0, 1), (1, 1), (129, 0), (130, 0), (143, 0)])
def test_a_signal_leaves_the_report_to_esper_report(
    tmp_path: Path, monkeypatch, capsys, code: int, reported: int
) -> None:
    calls: list[tuple[list[Path], Path]] = []
    monkeypatch.setattr(report, "report_runs", lambda _, *of_runs: calls.append(of_runs))
    report.report_ended(Console(), tmp_path, code)
    assert calls == [([tmp_path], tmp_path / "report.html")] * reported
    line = f"a signal ended the run; esper report {tmp_path} draws what it did\n"
    assert capsys.readouterr().err == ("" if reported else line)


def test_a_report_that_fails_does_not_look_like_a_failed_training(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "events.jsonl").touch()

    reasons = (KeyError("anything"), "'anything'"), (KeyError(), "KeyError")
    for error, reason in (*reasons, (OSError(28, "No space left"), "No space left")):
        monkeypatch.setattr(report, "write_report", Mock(side_effect=error))
        report.report_ended(Console(), tmp_path, 0)
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert f"the training in {tmp_path} is not affected" in line
        assert f"could not be written ({reason})" in line


def test_a_terminal_that_goes_away_ends_training_with_a_checkpoint(tmp_path: Path) -> None:
    hosts = ["--task=digits", "--envs=2", "--group-size=2", "--episode-length=2"]
    small = ["--max-batches=1", "--batch-size=4", "--lstm-hidden=8", "--threads=1"]
    more = [*hosts, *small, "--rounds=1000000"]
    command = ("train", "ppo", *more, f"--telemetry-dir={tmp_path}")
    terminal = OnTerminal(*command)
    try:
        # The display may skip rounds, so the disk tells.
        terminal.until(lambda _: any(tmp_path.glob("*/checkpoints/0*")))
    finally:
        os.close(terminal.master)  # the kernel sends SIGHUP
    _, status = os.waitpid(terminal.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    (run,) = tmp_path.iterdir()
    (finished,) = read_events(run, TrainingFinished)
    assert finished.status == "interrupted"
    assert load_latest(run).round == finished.round >= 1


@pytest.mark.parametrize("kind", ["python", "torch", "caused"])
def test_an_allocation_that_fails_is_one_line(kind: str, capsys) -> None:
    def command(_: list[str]) -> int:
        if kind == "python":
            raise MemoryError
        try:
            torch.empty(2**60, dtype=torch.uint8)
        except RuntimeError as error:
            if kind == "torch":
                raise
            raise RuntimeError("a shard failed") from error
        return 0

    assert refusal(capsys, command).startswith("esper: memory: the system gave no more")


def test_another_error_is_not_taken_for_one_of_memory() -> None:
    def command(_: list[str]) -> int:
        raise RuntimeError("a fault of Esper")

    with pytest.raises(RuntimeError, match="a fault"):
        run_guarded(command, [])
