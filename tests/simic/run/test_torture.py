"""Training that is killed, interrupted by signals, or started twice, at arbitrary moments.

The runs record their rollouts, so that records meet the same moments as checkpoints.
"""

import os
import random
import select
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from killed_training import TINY, Training, flags, pause, rounds_announced

from esper.karn.store import read_events
from esper.leyline.events import CheckpointSaved, TrainingFinished
from esper.simic.records.episodes import RecordReader, read_episodes
from esper.simic.run.checkpoint import load_latest
from esper.simic.training.vectorized import resume_ppo
from small_runs import assert_same, timeless


class Uninterrupted:
    """An uninterrupted run with a checkpoint of every round.

    Attributes:
        steps: number of steps of a save.
        seconds: approximate time from the start to the end of the third round.
    """

    def __init__(self, folder: Path, rounds: int):
        self.rounds = rounds
        settings = {"rounds": rounds, "telemetry_dir": folder, "keep_checkpoints": rounds}
        settings["record"] = True
        training = Training(flags(**TINY, **settings), folder.with_suffix(".log"))
        assert training.wait_for("started")
        begin = time.perf_counter()
        for _ in range(3):
            assert training.wait_for("save ends")
        self.seconds = time.perf_counter() - begin
        begun, ended = (training.messages.index(f"save {what}") for what in ("begins", "ends"))
        self.steps = ended - begun
        assert training.end() == 0, training.printed()
        (self.run,) = folder.iterdir()

    def policy(self, round_number: int) -> dict[str, torch.Tensor]:
        path = self.run / "checkpoints" / f"{round_number:06d}" / "policy.pt"
        return torch.load(path, weights_only=True)


class Chain:
    """A run that is killed and resumed until it has all its rounds."""

    def __init__(self, folder: Path, reference: Uninterrupted):
        self.folder, self.reference = folder, reference
        self.attempts = 0

    @property
    def run(self) -> Path | None:
        """The run directory, once it can be resumed."""
        runs = [path.parents[1] for path in self.folder.glob("*/checkpoints/[0-9]*")]
        return runs[0] if runs else None

    def resume(self) -> Training:
        self.attempts += 1
        log = self.folder.with_name(f"{self.folder.name}-{self.attempts}.log")
        if self.run is None:
            shutil.rmtree(self.folder, ignore_errors=True)  # nothing in it was announced
            place = {"telemetry_dir": self.folder, "keep_checkpoints": 2, "record": True}
            return Training(flags(**TINY, rounds=self.reference.rounds, **place), log)
        return Training(flags(resume=self.run, rounds=self.reference.rounds), log)

    def check(self, training: Training, capsys) -> int:
        """No announced round is lost, and the checkpoint is right. Returns its round."""
        announced = rounds_announced(training.printed())
        if self.run is None:
            assert announced == 0
            return 0
        found = load_latest(self.run)
        events = [event.round for event in read_events(self.run, CheckpointSaved)]
        assert found.round >= max(announced, *events, 0)
        assert capsys.readouterr().err == "", "a kill must not leave a corrupt checkpoint"
        assert_same(found.parts["policy"], self.reference.policy(found.round))
        recorded = [part.rounds[0].item() for part in RecordReader([self.run])]
        assert recorded[: found.round] == list(range(1, found.round + 1))
        assert len(recorded) <= found.round + 1
        return found.round

    def check_end(self) -> None:
        """The result equals that of the uninterrupted run."""
        assert self.run is not None
        end, expected = load_latest(self.run), load_latest(self.reference.run)
        assert (end.round, expected.round) == (self.reference.rounds,) * 2
        assert_same(end.parts, expected.parts)
        assert timeless(self.run) == timeless(self.reference.run)
        names = {path.name for path in (self.run / "checkpoints").iterdir()}
        kept = {f"{self.reference.rounds - k:06d}" for k in (0, 1)}
        # A kill after the last save and before the removal of older checkpoints leaves one more.
        assert kept <= names <= kept | {f"{self.reference.rounds - 2:06d}"}
        own, others = (read_episodes([run]) for run in (self.run, self.reference.run))
        assert own.rounds.tolist() == others.rounds.tolist()
        assert_same(own.observation.tensors(), others.observation.tensors())
        assert_same({"log_prob": own.log_prob}, {"log_prob": others.log_prob})
        assert not list((self.run / "records").glob("*.draft"))

    def kill(self, training: Training, generator: random.Random, inside: bool) -> bool:
        """Kill at a random time, or at a random step of one of the next two saves.

        Returns whether the kill happened during a save.
        """
        assert training.wait_for("started")
        if not inside:
            pause(generator.uniform(0.0, self.reference.seconds))
            return training.kill()
        for _ in range(generator.randrange(1, 3)):
            training.wait_for("save begins")
        for _ in range(generator.randrange(self.reference.steps)):
            training.hear()
        pause(generator.uniform(0.0, 0.001))
        return training.kill()


@pytest.mark.parametrize(
    ("kills", "inside", "rounds"), [(4, 2, 6), pytest.param(100, 30, 40, marks=pytest.mark.slow)]
)
def test_a_repeatedly_killed_run_loses_nothing(
    tmp_path: Path, kills: int, inside: int, rounds: int, capsys
) -> None:
    reference = Uninterrupted(tmp_path / "reference", rounds)
    generator = random.Random(11)
    done = done_inside = chains = 0
    while done < kills or done_inside < inside:
        chains += 1
        chain = Chain(tmp_path / f"chain-{chains}", reference)
        before = 0
        while before < rounds:
            training = chain.resume()
            aimed = done % 2 == 0 and done_inside < inside
            done_inside += chain.kill(training, generator, aimed)
            done += training.end() == -signal.SIGKILL
            now = chain.check(training, capsys)
            assert now >= before
            before = now
            if done >= kills and done_inside >= inside:
                break
        if before < rounds:
            assert chain.resume().end() == 0
        chain.check_end()
    print(f"{done} kills, {done_inside} inside a save, {chains} runs")


# --- signals ----------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_in(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def waiting(
    tmp_path: Path, where: str, times: int = 1, ignored: tuple[signal.Signals, ...] = (), **settings
) -> Training:
    """A run that waits in a place to which it has come so many times."""
    arguments = flags(**TINY, telemetry_dir=tmp_path / "runs", **settings)
    training = Training(arguments, tmp_path / "log", (where,), ignored)
    for _ in range(times - 1):
        assert training.wait_for(where)
        training.proceed()
    assert training.wait_for(where)
    return training


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory.mktemp("straight") / "runs", 4)


@pytest.mark.parametrize(
    ("where", "when", "done", "number"),
    [
        ("opening", 1, 0, signal.SIGINT),
        ("stepping", 1, 0, signal.SIGTERM),
        ("stepping", 3, 1, signal.SIGINT),
        ("updating", 2, 2, signal.SIGTERM),
    ],
    ids=["start-up", "first rollout", "rollout", "update"],
)
def test_a_signal_leaves_a_checkpoint_and_its_exit_status(
    tmp_path: Path,
    straight: Uninterrupted,
    where: str,
    when: int,
    done: int,
    number: signal.Signals,
) -> None:
    """``done`` rounds are kept; the resumed run ends in the same bits."""
    training = waiting(tmp_path, where, when, checkpoint_every=100, rounds=5)
    training.send(number)
    training.proceed()
    assert training.end() == 128 + number
    run = run_in(tmp_path / "runs")
    assert load_latest(run).round == done
    assert [event.status for event in read_events(run, TrainingFinished)] == ["interrupted"]
    assert "Traceback" not in training.printed()
    resumed = resume_ppo(run, {"rounds": done + 1})
    assert [r.round for r in resumed.rounds] == [done + 1]
    assert_same(load_latest(run).parts["policy"], straight.policy(done + 1))
    expected = [event for event in timeless(straight.run) if event["round"] <= done + 1]
    assert timeless(run) == expected


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_run_directory_exists_a_signal_ends_the_process_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Nothing is written; a shell reports status 143 for a process ended by SIGTERM."""
    training = waiting(tmp_path, "building")
    training.send(number)
    assert training.end() == {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}[number]
    assert not (tmp_path / "runs").exists()
    assert training.printed() == ""


def test_a_signal_after_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    training = waiting(tmp_path, "updating", rounds=1)
    training.send(signal.SIGTERM)
    training.proceed()
    assert training.end() == 0
    assert load_latest(run_in(tmp_path / "runs")).round == 1


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_a_run_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """Even while the disk hangs in the save of round 2; the earlier checkpoint is intact."""
    training = waiting(tmp_path, "save begins", 2, rounds=9)
    training.send(number)
    assert training.wait_for("listens otherwise")  # two pending signals would be delivered as one
    training.send(number)
    assert training.end() == {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}[number]
    assert "Traceback" not in training.printed()
    run = run_in(tmp_path / "runs")
    assert load_latest(run).round == 1
    assert len(resume_ppo(run, {"rounds": 2}).rounds) == 1


SECOND_ROUND = 1 + TINY["episode_length"]
"""The step with which it begins."""


def test_a_hangup_is_like_sigterm_and_a_second_one_does_not_hurt(tmp_path: Path) -> None:
    """A terminal that is closed sends two: one from its shell, one from the kernel."""
    training = waiting(tmp_path, "stepping", SECOND_ROUND, rounds=3)
    training.send(signal.SIGHUP)
    training.proceed()
    assert training.wait_for("listens otherwise")  # two pending signals would be delivered as one
    training.send(signal.SIGHUP)
    assert training.end() == 128 + signal.SIGHUP
    run = run_in(tmp_path / "runs")
    assert load_latest(run).round == 1
    assert [event.status for event in read_events(run, TrainingFinished)] == ["interrupted"]


def test_under_nohup_a_hangup_is_ignored(tmp_path: Path) -> None:
    ignored = (signal.SIGHUP,)
    training = waiting(tmp_path, "stepping", SECOND_ROUND, ignored=ignored, rounds=3)
    training.send(signal.SIGHUP)
    training.process.join(0.05)
    for _ in range(100):
        training.proceed()
    assert training.end() == 0
    assert load_latest(run_in(tmp_path / "runs")).round == 3


# --- streams that cannot be written -----------------------------------------------------------


def closed_pipe(place: Path) -> Path:
    """A named pipe whose reader goes away as soon as it is opened for writing."""
    os.mkfifo(place)
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)

    def leave() -> None:
        select.select([reader], [], [])  # readable once somebody has written
        os.close(reader)

    threading.Thread(target=leave, daemon=True).start()
    return place


@pytest.mark.parametrize("where", ["full disk", "closed pipe"])
def test_output_that_cannot_be_written_does_not_end_training(tmp_path: Path, where: str) -> None:
    log = Path("/dev/full") if where == "full disk" else closed_pipe(tmp_path / "pipe")
    folder = tmp_path / "runs"
    training = Training(flags(**TINY, telemetry_dir=folder, rounds=2), log)
    assert training.end() == 0
    run = run_in(folder)
    assert load_latest(run).round == 2
    assert [event.status for event in read_events(run, TrainingFinished)] == ["finished"]
    assert (run / "report.html").exists()


# --- two writers ------------------------------------------------------------------------------


def contents(run: Path) -> dict[Path, bytes]:
    """All files except the events, which a thread of the first writer may still write."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != "events.jsonl")
    return {path: path.read_bytes() for path in files}


def test_a_second_process_that_resumes_a_run_is_refused(tmp_path: Path) -> None:
    """The second may resume once the first has ended, even by SIGKILL."""
    first = waiting(tmp_path, "updating", 2, rounds=9)
    run = run_in(tmp_path / "runs")
    before = contents(run)
    second = Training(flags(resume=run, rounds=9), tmp_path / "2")
    assert second.end() == 2
    (line,) = second.printed().splitlines()
    assert line.startswith("esper: run directory: another process is writing to ")
    assert contents(run) == before
    first.kill()
    third = Training(flags(resume=run, rounds=2), tmp_path / "3")
    assert third.end() == 0, third.printed()
    assert load_latest(run).round == 2
