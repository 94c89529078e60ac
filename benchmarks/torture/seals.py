"""Flipped bits and cuts of every kind of sealed file that a command reads back."""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from esper.karn import grown_runs
from esper.leyline.disk import CHECKSUM, sealed_json
from esper.leyline.errors import UsageError
from esper.nissa.sinks import rotate
from esper.runtime.gate import NOTHING
from esper.scripts import grow_model
from esper.scripts.entry import run_guarded
from esper.scripts.grow import grow
from esper.scripts.query import query
from esper.scripts.several_seeds import SETTINGS, train_seeds
from esper.simic.records.episodes import read_episodes
from esper.simic.run.checkpoint import load_latest
from esper_lab.evaluation import Evaluation, Rung, encoded, read_evaluation
from esper_lab.play import Outcome, load_or_make
from torture.common import TINY, Part, fresh, quiet, timed, trained
from torture.inputs import spoil

FLIPS, CUTS = 1000, 200
MODEL = """
from own_modules import ResidualNet, images, loader

def model():
    return ResidualNet()

def loaders():
    return loader(*images(48)), loader(*images(32, 1)), loader(*images(32, 2))
"""
Command = Callable[[], int]
"""Runs a command again on files that may be damaged; returns its exit status."""


def seals(work: Path) -> Part:
    """Damage one file at a time; one line names it, and nothing of it is taken for the whole."""
    part = Part(f"{FLIPS} flips and {CUTS} cuts of each kind of sealed file")
    outcomes: Counter[str] = Counter()
    with timed(part), _inside(work):
        makers = (_stopped_growth, _finished_growth, _stage, _ladder, _seeds)
        for make in (*makers, _checkpoint, _records, _events):
            paths, command = make()
            for path in paths:
                _harm(path, command, part, outcomes)
        part.notes = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    return part


def forgeries(work: Path, count: int = 500) -> Part:
    """Odd entries under a checksum that is right: one line, or the command does what it does."""
    part = Part(f"{count} odd entries with valid seals in each other kind of file")
    outcomes: Counter[str] = Counter()
    with timed(part), _inside(work):
        for make in (_stopped_growth, _finished_growth, _ladder, _seeds):
            paths, command = make()
            for path in paths:
                if path.suffix == ".json":
                    _forge(path, command, part, outcomes, count)
        part.notes = ", ".join(f"{number} {what}" for what, number in sorted(outcomes.items()))
    return part


def _forge(path: Path, command: Command, part: Part, outcomes: Counter[str], count: int) -> None:
    whole, draws, folder = path.read_bytes(), random.Random(path.name), path.absolute().parent
    copy = folder.with_name(f"{folder.name}-whole") if folder != Path.cwd() else None
    if copy is not None:
        shutil.copytree(folder, copy)
    for number in range(count):
        entries = json.loads(whole)
        entries.pop(CHECKSUM)
        spoil(entries, draws)
        path.write_bytes(sealed_json(entries))
        if (outcome := _outcome(command, f"{path} {number}", part)) is not None:
            status, lines = outcome
            outcomes[f"{'refused' if status else 'taken'} {path.name}"] += 1
            if status not in (0, 1, 2) or (status == 2 and len(lines) != 1):
                part.lost.append(f"{path} {number}: status {status}, {lines}")
        if copy is not None:
            fresh(copy, folder)
    path.write_bytes(whole)


def _outcome(command: Command, what: str, part: Part) -> tuple[int, list[str]] | None:
    """Exit status and lines of a command; None if an exception left it, which is noted."""
    part.tried += 1
    try:
        with quiet() as told:
            status = command()
    except Exception as error:
        part.lost.append(f"{what}: {type(error).__name__}: {error}")
        return None
    return status, told.getvalue().splitlines()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _harm(path: Path, command: Command, part: Part, outcomes: Counter[str]) -> None:
    whole, draws = path.read_bytes(), random.Random(path.name)
    for number in range(FLIPS + CUTS):
        content = bytearray(whole)
        if number < FLIPS:
            content[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
        else:
            del content[draws.randrange(len(whole)) :]
        path.write_bytes(content)
        if (outcome := _outcome(command, f"{path} {number}", part)) is None:
            continue
        status, lines = outcome
        # A query leaves events out that cannot be read, and counts them in a second line.
        expected = (0, 2) if path.parent.name == "events" else (2, 1)
        if (status, len(lines)) == expected and path.name in lines[0]:
            outcomes[f"noticed {_kind(path)}"] += 1
        else:
            part.lost.append(f"{path} {number}: status {status}, {lines}")
    path.write_bytes(whole)


def _kind(path: Path) -> str:
    """The name of a file, or of its folder if it has a number."""
    return path.name if path.suffix != ".parquet" else f"{path.parent.name}/*.parquet"


def _reading(read: Callable[[], object]) -> Command:
    """A command that only reads."""

    def command(_: list[str]) -> int:
        read()
        return 0

    return lambda: run_guarded(command, [])


def _growth(out: str) -> list[str]:
    Path("mine.py").write_text(MODEL)
    return ["--model", "mine.py", "--policy", "never", "--epochs", "2", "--out", out]


def _stopped_growth() -> tuple[list[Path], Command]:
    """A growth that could not write its files: a rerun goes on from ``progress.pt``."""
    words = _growth("stopped")

    def full(*_: object) -> int:
        raise UsageError("out: full")

    with patch.object(grow_model, "write_files", full), quiet():
        run_guarded(grow, words)
    names = (grown_runs.PROGRESS, grown_runs.SETTINGS)
    return [Path("stopped", name) for name in names], lambda: run_guarded(grow, words)


def _finished_growth() -> tuple[list[Path], Command]:
    words = _growth("finished")
    with quiet():
        run_guarded(grow, words)
    return [Path("finished", grown_runs.RESULT)], lambda: run_guarded(grow, words)


def _stage() -> tuple[list[Path], Command]:
    path, draws = Path("stage.npz"), np.random.default_rng(0)

    def play() -> Outcome:
        names = [name for name in Outcome.__slots__ if name != "features"]
        tables = {name: draws.normal(size=(2, 3)) for name in names}
        return Outcome(**tables, features=draws.normal(size=(2, 4, 5)))

    load_or_make(path, play)
    return [path], _reading(lambda: load_or_make(path, play))


def _seeds() -> tuple[list[Path], Command]:
    """The settings that several seeds share."""
    from esper.leyline.config import unflatten

    config = unflatten({**TINY, "rounds": 1, "telemetry_dir": "seeds", "name": "pair"})

    def train(_: list[str]) -> int:
        return train_seeds("ppo", config, 2, {}, [], NOTHING)

    with quiet():
        run_guarded(train, [])
    path = Path("seeds", "pair", SETTINGS)
    assert json.loads(path.read_text())
    return [path], lambda: run_guarded(train, [])


def _ladder() -> tuple[list[Path], Command]:
    """The file of an evaluation, which the report of a run reads."""
    path, values = Path("ladder.json"), [0.5, 0.25]
    rungs = [Rung("never grow", False, values, values, [0.0, 0.0])]
    path.write_bytes(
        encoded(Evaluation("rule", "digits", 2, ["a", "b"], ["never"], rungs, [None] * 2))
    )
    return [path], _reading(lambda: read_evaluation(path))


def _checkpoint() -> tuple[list[Path], Command]:
    """Every file of a checkpoint, from which runs are resumed and policies are taken."""
    run = trained(Path("saved"), 1)
    (folder,) = (run / "checkpoints").glob("[0-9]*")
    return sorted(folder.iterdir()), _reading(lambda: load_latest(run))


def _records() -> tuple[list[Path], Command]:
    """A round of episodes, from which policies learn."""
    run = trained(Path("recorded"), 1, record=True)
    return sorted((run / "records").glob("*.parquet")), _reading(lambda: read_episodes([run]))


def _events() -> tuple[list[Path], Command]:
    """A part to which the lines of a long run have moved; its query leaves them out."""
    run = trained(Path("moved"), 1)
    rotate(run, 1 << 20)
    words = [str(run), "select count(*) from updates"]
    return sorted((run / "events").glob("*.parquet")), lambda: run_guarded(query, words)
