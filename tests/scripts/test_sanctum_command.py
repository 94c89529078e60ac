"""Sanctum on a pseudo-terminal: alone, beside a training, and killed."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from importlib import import_module
from pathlib import Path

import pytest

from esper.scripts.main import COMMANDS
from esper.scripts.sanctum import find_run
from processes import ESPER, ROOT, WATCHDOG, called, environment, ran, ran_python
from scripts.pseudo_terminal import OnTerminal
from small_runs import events_of

RECORDED = ROOT / "tests" / "recorded"
SETTINGS = "--envs 2 --group-size 2 --episode-length 4 --max-batches 1 --batch-size 8 --threads 1"
MANY = 1_000_000
"""More rounds than a training completes before a test ends it."""
LEAVES_SCREEN, ENTERS_SCREEN = b"\x1b[?1049l", b"\x1b[?1049h"


def training(tmp_path: Path, rounds: int, *more: str, backend: str = "torch") -> list[str]:
    return [
        "train", "ppo", *SETTINGS.split(), "--rounds", str(rounds), "--backend", backend,
        "--telemetry-dir", str(tmp_path), *more,
    ]  # fmt: skip


def outcomes(run: Path) -> list[dict[str, object]]:
    """Return the outcome of each round without its timings."""
    events = events_of(run, "EPISODE_OUTCOME")
    return [{name: e[name] for name in e if name != "time"} for e in events]


def wait_for(run_place: Path, text: str, times: int = 1) -> Path:
    """Return the run directory once its events contain ``text`` so many times."""
    end = time.monotonic() + WATCHDOG
    while time.monotonic() < end:
        for events in run_place.glob("*/events.jsonl"):
            if events.read_text().count(text) >= times:
                return events.parent
        time.sleep(0.05)
    raise TimeoutError(text)


def test_sanctum_restores_the_terminal_when_it_is_closed(terminal) -> None:
    one = terminal("sanctum", str(RECORDED / "healthy"))
    one.until(lambda out: "■ finished".encode() in out)
    one.type("2")
    one.until(lambda out: b"gradient norm" in out)
    one.type("q")
    assert one.exit_status() == 0
    assert LEAVES_SCREEN in one.output[one.output.index(ENTERS_SCREEN) :]
    assert one.modes() == one.modes_before


def test_ctrl_c_closes_it(terminal) -> None:
    one = terminal("sanctum", str(RECORDED / "anomalous"))
    one.until(lambda out: "■ finished".encode() in out)
    one.type("\x03")
    assert one.exit_status() == 0
    assert one.modes() == one.modes_before


def test_the_latest_of_several_runs_is_shown(tmp_path: Path) -> None:
    for i, name in enumerate(("old", "new", "middle")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        when = {"old": 1, "middle": 2, "new": 3}[name] * 1000
        os.utime(tmp_path / name, (when, when))
        assert i < 3
    assert find_run(tmp_path) == tmp_path / "new"
    assert find_run(tmp_path / "old") == tmp_path / "old"


def test_without_a_terminal_training_continues_without_sanctum(tmp_path: Path) -> None:
    done = called(training(tmp_path, 1, "--sanctum"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("sanctum: needs a terminal; training without it") == 1
    assert "finished after" in done.stdout


def test_sanctum_shows_a_training_to_its_end_until_it_is_closed(terminal, tmp_path: Path) -> None:
    one = terminal(*training(tmp_path, 3, "--sanctum"))
    one.until(lambda out: "■ finished".encode() in out)
    one.type("q")
    assert one.exit_status() == 0
    after = one.output[one.output.rindex(LEAVES_SCREEN) :].decode()
    assert "finished after" in after
    assert "report: " in after
    assert one.modes() == one.modes_before
    (run,) = tmp_path.iterdir()
    assert "round 3/3" in (run / "console.log").read_text()
    shown = one.output[one.output.index(ENTERS_SCREEN) : one.output.rindex(LEAVES_SCREEN)]
    assert b"round 1/3  gain" not in shown


def test_after_closing_or_killing_sanctum_the_training_shows_progress(
    terminal, tmp_path: Path
) -> None:
    for folder, end in (("closed", None), ("killed", signal.SIGKILL)):
        one = terminal(*training(tmp_path / folder, MANY, "--sanctum"))
        one.until(lambda out: "● live".encode() in out)
        if end is None:
            one.type("q")
        else:
            (child,) = one.children()
            os.kill(child, end)
        one.until(lambda out: b"training continues" in out)
        assert one.modes() == one.modes_before
        one.until(lambda out: b"steps/s" in out[out.rindex(b"training continues") :])
        assert (b"ended with status -9" in one.output) == (end is not None)
        one.type("\x03")
        assert one.exit_status() == 130
        run = wait_for(tmp_path / folder, '"status":"interrupted"')
        assert any((run / "checkpoints").iterdir())


def test_ending_the_training_ends_sanctum(terminal, tmp_path: Path) -> None:
    one = terminal(*training(tmp_path, MANY, "--sanctum"))
    one.until(lambda out: "● live".encode() in out)
    one.signal(signal.SIGTERM)
    assert one.exit_status() == 143
    assert one.modes() == one.modes_before
    assert LEAVES_SCREEN in one.output
    wait_for(tmp_path, '"status":"interrupted"')


def test_killing_the_training_ends_sanctum(terminal, tmp_path: Path) -> None:
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("needs bash, for a shell that has job control")
    one = terminal(command=[shell, "--norc", "--noprofile", "-i"])
    one.type(shlex.join([*ESPER, *training(tmp_path, MANY, "--sanctum")]) + "\n")
    one.until(lambda out: "● live".encode() in out)
    (trains,) = one.children()
    (watches,) = one.children(trains)
    os.kill(trains, signal.SIGKILL)
    one.until(lambda out: LEAVES_SCREEN in out)
    end = time.monotonic() + WATCHDOG
    while Path(f"/proc/{watches}").exists() and time.monotonic() < end:
        one.read(0.1)
    assert not Path(f"/proc/{watches}").exists()
    one.type("echo the shell $((40 + 2))\n")
    one.until(lambda out: b"the shell 42" in out)
    one.type("exit\n")


def kill_while_training(place: Path, kills: int) -> None:
    """Kill Sanctum repeatedly beside a training; the run's bits equal those of one alone.

    The first time it shows the run, later it may still be starting.
    """
    process = subprocess.Popen(
        [*ESPER, *training(place / "watched", MANY)], env=environment(), stdout=subprocess.DEVNULL
    )
    draw = random.Random(7)
    try:
        run = wait_for(place / "watched", "EPOCH_COMPLETED")
        for number in range(kills):
            one = OnTerminal("sanctum", str(run))
            end = time.monotonic() + draw.uniform(0.0, 2.0)
            if number == 0:
                one.until(lambda out: "● live".encode() in out)
            while time.monotonic() < end:
                one.read()
            one.close()
            assert process.poll() is None
        wait_for(place / "watched", "EPISODE_OUTCOME", kills // 10 + 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WATCHDOG) == 143
    finally:
        process.kill()
    watched = outcomes(run)
    few = min(len(watched), 10 * kills, 200)
    assert ran([*ESPER, *training(place / "alone", few)]).returncode == 0
    (alone,) = (place / "alone").iterdir()
    assert watched[:few] == outcomes(alone)


def test_a_kill_does_not_touch_a_training(tmp_path: Path) -> None:
    kill_while_training(tmp_path, 1)


@pytest.mark.slow
def test_a_hundred_kills_do_not_touch_a_training(tmp_path: Path) -> None:
    kill_while_training(tmp_path, 100)


def test_command_summaries_agree_with_the_commands_docstrings() -> None:
    for name, summary in COMMANDS.items():
        module = import_module(f"{'esper_lab' if name == 'evaluate' else 'esper.scripts'}.{name}")
        assert getattr(module, name).__doc__.strip().splitlines()[0] == summary


def test_sanctum_and_reports_do_not_import_torch(tmp_path: Path) -> None:
    imports = "import sys, esper.scripts.main, esper.scripts.sanctum, esper.scripts.report as page"
    call = f"page.report(['{RECORDED}/healthy', '--output={tmp_path}/report.html'])"
    assert ran_python(f"{imports}\nsys.exit({call} or 'torch' in sys.modules)").returncode == 0


def test_several_runs_are_shown_until_none_is_chosen(tmp_path: Path, monkeypatch) -> None:
    from esper.karn.sanctum import app, side_by_side
    from esper.scripts import sanctum

    runs = [Path(shutil.copytree(RECORDED / "healthy", tmp_path / name)) for name in "ab"]
    shown: list[Path] = []
    choices = iter([runs[1], None])
    monkeypatch.setattr(sanctum, "is_terminal", lambda: True)
    monkeypatch.setattr(side_by_side.SideBySide, "run", lambda self: next(choices))
    monkeypatch.setattr(app.Sanctum, "__init__", lambda self, run, *_: shown.append(run))
    monkeypatch.setattr(app.Sanctum, "run", lambda self: None)
    assert sanctum.sanctum([str(run) for run in runs]) == 0
    assert shown == [runs[1]]
