"""Records of runs that are resumed, killed, bounded in size, or on a disk that fails."""

import errno
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from esper.leyline import disk
from esper.leyline.config import unflatten
from esper.leyline.records import record_files, record_path, round_of
from esper.simic.ppo import PPOAgent
from esper.simic.records import record_writer
from esper.simic.records.episodes import read_episodes
from esper.simic.training.vectorized import resume_ppo, run_training, train_ppo_vectorized
from small_runs import SMALL


def settings(place: Path, **more: object) -> dict:
    return SMALL | {"telemetry_dir": str(place), "record": True} | more


def rounds(run: Path) -> list[int]:
    return [round_of(path) for path in record_files(run)]


def table(run: Path, number: int) -> pyarrow.Table:
    return pyarrow.parquet.read_table(record_path(run, number)).replace_schema_metadata()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run of four rounds."""
    place = tmp_path_factory.mktemp("whole")
    return train_ppo_vectorized(**settings(place, rounds=4)).path


def test_every_round_has_one_file_and_nothing_else_is_left(whole: Path) -> None:
    assert rounds(whole) == [1, 2, 3, 4]
    assert len(list((whole / "records").iterdir())) == 4


def test_a_resumed_run_has_the_records_of_an_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    run = train_ppo_vectorized(**settings(tmp_path, rounds=2)).path
    resume_ppo(run, {"rounds": 4})
    assert rounds(run) == [1, 2, 3, 4]
    for number in rounds(run):
        assert table(run, number) == table(whole, number)


@pytest.mark.parametrize("every", [1, 3])
def test_rounds_after_the_checkpoint_are_neither_lost_nor_twice(
    whole: Path, tmp_path: Path, every: int, monkeypatch
) -> None:
    """The process dies in the update of round 3, whose record is already on the disk."""

    def dying(self, rollout, own=PPOAgent.update) -> dict:
        if self.updates == 2:
            raise KeyboardInterrupt
        return own(self, rollout)

    with monkeypatch.context() as patch:
        patch.setattr(PPOAgent, "update", dying)
        with pytest.raises(KeyboardInterrupt):
            train_ppo_vectorized(**settings(tmp_path, rounds=4, checkpoint_every=every))
    (run,) = tmp_path.iterdir()
    assert rounds(run) == [1, 2, 3]
    # That of a killed process with more rounds than the next one.
    (run / "records" / "round-000009.draft").write_bytes(b"PAR1")
    if every == 3:
        with pytest.raises(ValueError, match="no checkpoint"):
            resume_ppo(run, {"rounds": 4})
        assert rounds(run) == [1, 2, 3], "a run that cannot be resumed stays as it is"
        return
    # Whatever stands in the place of a round that is run again is replaced.
    record_path(run, 3).write_bytes(b"of a round that was not saved")
    resume_ppo(run, {"rounds": 4})
    assert rounds(run) == [1, 2, 3, 4]
    assert not list((run / "records").glob("*.draft"))
    for number in rounds(run):
        assert table(run, number) == table(whole, number)


def test_records_of_rounds_that_are_run_again_go_even_if_nothing_is_recorded_then(
    whole: Path, tmp_path: Path
) -> None:
    run = train_ppo_vectorized(**settings(tmp_path, rounds=2)).path
    record_path(run, 3).write_bytes(record_path(run, 2).read_bytes())
    resume_ppo(run, {"rounds": 3, "record": False})
    assert rounds(run) == [1, 2]
    resume_ppo(run, {"rounds": 4, "record": True})
    assert rounds(run) == [1, 2, 4]
    assert table(run, 4) == table(whole, 4)


def test_two_runs_have_different_ids_and_a_resumed_one_keeps_its_own(tmp_path: Path) -> None:
    def identity(run: Path) -> str:
        return json.loads((run / "config.json").read_text())["id"]

    first, second = (
        train_ppo_vectorized(**settings(tmp_path / name, rounds=1)).path for name in "ab"
    )
    before = identity(first)
    assert before != identity(second)
    resume_ppo(first, {"rounds": 2})
    assert identity(first) == before


@pytest.mark.parametrize("last", [1, 2, 9])
def test_only_the_latest_records_are_kept(
    whole: Path, tmp_path: Path, last: int, monkeypatch
) -> None:
    most = []

    def counted(path: Path, content: bytes) -> None:
        disk.replace_synced(path, content)
        most.append(len(record_files(path.parents[1])))

    monkeypatch.setattr(record_writer, "replace_synced", counted)
    run = train_ppo_vectorized(**settings(tmp_path, rounds=4, record_last=last)).path
    assert rounds(run) == [1, 2, 3, 4][-last:]
    assert max(most) <= last + 1
    assert table(run, 4) == table(whole, 4)


def test_the_limit_may_change_on_resuming(tmp_path: Path) -> None:
    run = train_ppo_vectorized(**settings(tmp_path, rounds=3)).path
    resume_ppo(run, {"rounds": 4, "record_last": 2})
    assert rounds(run) == [3, 4]


def test_a_limit_without_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^record_last: nothing is recorded; give --record too"):
        train_ppo_vectorized(**settings(tmp_path, record=False, record_last=2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["ppo", "heuristic"])
def test_on_a_full_disk_training_continues_and_says_so_once(
    whole: Path, tmp_path: Path, policy: str, monkeypatch, capsys
) -> None:
    full_at = []

    def filling(path: Path, content: bytes) -> None:
        if path.name == "round-000002.parquet":
            full_at.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        disk.replace_synced(path, content)

    monkeypatch.setattr(record_writer, "replace_synced", filling)
    run = run_training(unflatten(settings(tmp_path, rounds=4)), policy)
    assert (run.status, run.exit_code, len(run.rounds)) == ("finished", 0, 4)
    assert len(full_at) == 1
    assert capsys.readouterr().err.splitlines() == [
        "warning: records: round 2 failed (No space left on device); "
        "training continues and records no more rounds"
    ]
    assert rounds(run.path) == [1]
    assert read_episodes([run.path]).count == 4


@pytest.mark.parametrize("where", ["pathlib.Path.open", "os.fsync", "pathlib.Path.replace"])
def test_a_failed_write_leaves_no_part_of_a_file(tmp_path: Path, where: str, monkeypatch) -> None:
    run = train_ppo_vectorized(**settings(tmp_path, rounds=1)).path

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(OSError, match="Input/output error"):
            record_writer.replace_synced(record_path(run, 2), b"x")
    assert [path.name for path in (run / "records").iterdir()] == ["round-000001.parquet"]
