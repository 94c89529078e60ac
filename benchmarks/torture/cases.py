"""Commands that write files, and what of the files must be the same after a rerun."""

import filecmp
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from unittest.mock import patch

from esper.simic.training.vectorized import train_ppo_vectorized
from torture.common import TINY, differs, trained
from torture.seals import MODEL

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["esper.scripts.main", "esper_lab.evaluate", "sklearn.datasets"])

NO_MORE = "give a larger total"
"""What a command says whose run has all of its rounds or epochs."""
Disturbance = Callable[[], object]
"""Changes the process in which a command is about to run."""


@dataclass(frozen=True)
class Case:
    """A command that writes into one folder, the disk.

    Attributes:
        name: of the command.
        words: its arguments; ``DISK`` stands for the folder.
        again: its arguments when it is called again after it was disturbed, given the folder.
        same: what differs between the folder and that of an undisturbed command.
        content: what lies in the folder before, as name and path.
        continues: whether it takes minutes from the beginning, and little from where it was.
    """

    name: str
    words: list[str]
    again: Callable[[Path], list[str]]
    same: Callable[[Path, Path], str]
    content: tuple[tuple[str, Path], ...] = ()
    continues: bool = False

    def first(self, disk: Path) -> list[str]:
        """The arguments of the undisturbed command."""
        return [word.replace("DISK", str(disk)) for word in self.words]

    def rerun(self, disk: Path) -> list[str]:
        """The arguments of the command after it was disturbed."""
        return [word.replace("DISK", str(disk)) for word in self.again(disk)]

    def fill(self, disk: Path) -> None:
        """Leave in the folder what lies there before the command."""
        clear(disk)
        for name, source in self.content:
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, disk / name)


def clear(folder: Path, beside_a_writer: bool = False) -> None:
    """Remove what lies in a folder; all that can be removed if a process still writes there."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=beside_a_writer)
        else:
            path.unlink(missing_ok=beside_a_writer)


def called(words: list[str], log: Path, disturb: Disturbance | None = None) -> tuple[int, str]:
    """Exit status and output of a command in a process that has imported everything."""
    process = begun(words, log, disturb)
    process.join()
    return process.exitcode or 0, printed(log)


def begun(words: list[str], log: Path, disturb: Disturbance | None = None) -> BaseProcess:
    """The process of a command that has begun, so that a signal reaches the command.

    Args:
        words: the arguments.
        log: file of its output.
        disturb: is called in the process before the command.
    """
    begins = _CONTEXT.Event()
    process = _CONTEXT.Process(target=_call, args=(words, log, begins, disturb))
    log.write_text("")
    process.start()
    begins.wait()
    return process


def printed(log: Path) -> str:
    """What a command has printed."""
    return log.read_text(errors="backslashreplace")


def problem_with(case: Case, disk: Path, whole: Path, status: int, output: str) -> str:
    """What is wrong after a rerun: it failed, or left other files than an undisturbed command."""
    # Killed after its last checkpoint, an offline run has no more epochs to learn.
    if status and not (status == 2 and NO_MORE in output):
        return f"the rerun ends with {status}: {output[-300:]}"
    return case.same(disk, whole)


def _call(words: list[str], log: Path, begins: Event, disturb: Disturbance | None) -> None:
    from esper.scripts.entry import run_guarded
    from esper.scripts.main import esper

    if words[0] == "train":
        # The report has a sweep of its own, and drawing takes longer than all of a tiny training.
        patch("esper.scripts.report.write_report", lambda runs, target: target).start()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        try:
            if disturb is not None:
                disturb()
        finally:
            begins.set()
        status = run_guarded(esper, words)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def cases(work: Path) -> Iterator[Case]:
    """The commands, with the files in ``work`` that they read."""
    yield from _learners(work)
    yield from _gymnasium(work)
    model = work / "mine.py"
    model.write_text(MODEL)
    grow = ["grow", "--model", str(model), "--policy=never", "--epochs=2"]
    one, names = [*grow, "--out=DISK/out"], ("state_dict.pt", "rebuild.py", "model.pt2")
    yield Case("grow", one, lambda _: one, lambda a, b: _same_files(a / "out", b / "out", names))
    run = str(work / "base" / "small")
    report = ["report", run, "--output=DISK/report.html"]
    query = ["query", run, "select * from steps", "--format=csv", "--output=DISK/steps.csv"]
    for words, file, content in (
        (report, "report.html", "an earlier report"),
        (query, "steps.csv", "an,earlier,table\n"),
    ):
        earlier = work / f"old-{file}"
        earlier.write_text(content)
        same = partial(_same_files, names=(file,))
        yield Case(words[0], words, partial(_unchanged, words), same, ((file, earlier),))
    flags = ["--policy=never", "--suite=digits", "--hosts=4", "--training-hosts=20", "--fresh"]
    flags += ["--out=DISK/evaluation", "--work=DISK/stages", "--threads=1"]
    evaluate = ["evaluate", *flags]
    again = partial(_unchanged, evaluate)
    yield Case("evaluate", evaluate, again, _same_evaluation, continues=True)


def _unchanged(words: list[str], disk: Path) -> list[str]:
    """The words of a command that is called again as it was."""
    return words


def _learners(work: Path) -> Iterator[Case]:
    """Commands that leave a run directory, or one for each seed."""
    tiny = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    place = ["--name=small", "--telemetry-dir=DISK/runs"]
    train = ["train", "ppo", *tiny, "--rounds=2", *place]
    records = trained(work / "base", 2, name="small", record=True)
    yield Case("train", train, partial(_resumed, train), _same_runs)
    seeds = [*train, "--seeds=2"]
    yield Case("seeds", seeds, lambda _: seeds, _same_runs)
    for algorithm in ("imitation", "offline"):
        words = ["train", algorithm, f"--records={records}", "--epochs=3", "--held-out=0"]
        words += ["--lstm-hidden=8", "--threads=1", *place]
        yield Case(algorithm, words, partial(_resumed, words), _same_runs)


def _gymnasium(work: Path) -> Iterator[Case]:
    """Commands of a Gymnasium task: training keeps the best checkpoint, playing exports it."""
    settings: dict[str, Any] = {
        "gym": "CartPole-v1",
        "envs": 2,
        "rollout_steps": 16,
        "lstm_hidden": 8,
    }
    settings |= {"evaluate_every": 1, "evaluation_episodes": 2, "threads": 1, "rounds": 2}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    train = ["train", "ppo", *flags, "--record", "--name=small", "--telemetry-dir=DISK/runs"]
    yield Case("gym", train, partial(_resumed, train), _same_runs)
    run = work / "base" / "cart"
    if not run.exists():
        train_ppo_vectorized(name=run.name, telemetry_dir=str(run.parent), **settings)
    play = ["play", str(run), "--episodes=2", "--out=DISK/policy.pt2"]
    earlier = work / "old-policy.pt2"
    earlier.write_text("an earlier policy")
    same = partial(_same_files, names=("policy.pt2",))
    yield Case("play", play, partial(_unchanged, play), same, (("policy.pt2", earlier),))


def _resumed(train: list[str], disk: Path) -> list[str]:
    """The words that go on with the run if it has a checkpoint, or begin it again."""
    runs = disk / "runs"
    rounds = next(word for word in train if word.startswith(("--rounds", "--epochs")))
    for run in runs.iterdir() if runs.exists() else ():
        if any(run.glob("checkpoints/[0-9]*")):
            return [*train[:2], f"--resume={run}", rounds]
    shutil.rmtree(runs, ignore_errors=True)
    return train


def runs_in(disk: Path) -> list[Path]:
    """The run directories that a command has left."""
    return sorted(path.parent for path in (disk / "runs").rglob("checkpoints"))


def _same_runs(disk: Path, whole: Path) -> str:
    runs, others = runs_in(disk), runs_in(whole)
    if len(runs) != len(others):
        return f"{len(runs)} runs instead of {len(others)}"
    return next(filter(None, map(differs, runs, others)), "")


def _same_files(disk: Path, whole: Path, names: tuple[str, ...]) -> str:
    _, wrong, errors = filecmp.cmpfiles(disk, whole, names, shallow=False)
    return f"{(wrong + errors)[0]} differs" if wrong or errors else ""


def _same_evaluation(disk: Path, whole: Path) -> str:
    def figures(place: Path) -> Any:
        paths = list((place / "evaluation").glob("*.json"))
        content = json.loads(paths[0].read_text()) if len(paths) == 1 else {}
        return {name: value for name, value in content.items() if "second" not in name}

    return "" if figures(disk) == figures(whole) else "other figures"
