"""Every file that a later command reads back is of a kind whose damage is noticed."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from esper.karn.report import write_report
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.leyline.run_files import LADDERS
from esper.scripts import grow_model, grown_files
from esper.scripts.entry import run_guarded
from esper.scripts.grow import grow
from esper.scripts.query import query
from esper.scripts.runs import runs
from esper.simic.training.replay import replay
from esper.simic.training.vectorized import resume_ppo, run_training
from own_modules import SOURCE
from small_runs import SMALL

KINDS = {
    r"checkpoints/(\.draft-)?\d+/manifest\.json": "its own checksum",
    r"checkpoints/(\.draft-)?\d+/\w+\.pt": "a checksum in the manifest",
    r"records/round-\d+\.(parquet|draft)": "a seal in its metadata",
    r"events/[\d-]+[0-9a-f-]+\.parquet": "a digest in its name",
    r"(progress|settings|result)\.(pt|json)": "a seal",
    r"ladders/[\w-]+\.json": "a seal",
    # Without a checksum: a line that cannot be read is counted and left out.
    r"events\.jsonl": "line by line",
    # Without a checksum: people edit it; the checkpoint holds the settings that count.
    r"config\.json": "compared with the identity in the checkpoint",
    # Locked, never read.
    r"lock": "empty",
    # Read to compare with what was to be written, before they replace the file.
    r"[\w-]+\.draft": "compared with the content in memory",
    # Read once after it was written, by the comparison of its outputs with the network.
    r"state_dict\.pt": "compared with the network",
}
"""How the damage of each kind of file is noticed."""

_watched: dict[str, Any] = {"folder": None, "paths": set()}


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    folder = _watched["folder"]
    if folder is None or event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path = Path(os.path.abspath(os.fsdecode(arguments[0])))
    flags = arguments[2] if isinstance(arguments[2], int) else 0
    reads = flags & os.O_ACCMODE != os.O_WRONLY
    if reads and folder in path.parents and not path.is_dir():
        _watched["paths"].add(str(path.relative_to(folder)))


@contextmanager
def watched(folder: Path) -> Iterator[set[str]]:
    """The files below ``folder`` that are opened for reading within the context."""
    if not _watched.get("hook"):
        # A hook cannot be removed; without a folder it does nothing.
        sys.addaudithook(_note)
        _watched["hook"] = True
    _watched.update(folder=folder.absolute(), paths=set())
    try:
        yield _watched["paths"]
    finally:
        _watched["folder"] = None


def unknown(paths: set[str]) -> list[str]:
    return sorted(p for p in paths if not any(re.fullmatch(kind, p) for kind in KINDS))


def test_what_a_resume_and_the_readers_of_a_run_open(tmp_path: Path, capsys) -> None:
    more = {"telemetry_dir": str(tmp_path), "rounds": 2, "record": True, "max_batches": 1}
    run = run_training(unflatten(SMALL | more), "ppo").path
    with watched(run) as paths:
        resume_ppo(run, {"rounds": 3})
        for view in ("updates", "records", "runs"):
            words = [str(run), f"SELECT count(*) FROM {view}"]
            assert run_guarded(query, words) == 0
        assert run_guarded(runs, [str(tmp_path)]) == 0
        (run / LADDERS).mkdir()
        (run / LADDERS / "digits.json").write_text("{}")
        write_report([run], tmp_path / "report.html")
    assert {"config.json", "events.jsonl", "checkpoints/000002/manifest.json"} <= paths
    assert {"records/round-000001.parquet", "ladders/digits.json"} <= paths
    assert unknown(paths) == []


def test_what_a_rerun_of_grow_opens(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    monkeypatch.setattr(grown_files, "_write_programs", lambda *_: {})
    words = ["--model", "mine.py", "--policy", "never", "--epochs", "2", "--out", "out"]

    def full(*_: object) -> int:
        raise UsageError("out: full")

    with monkeypatch.context() as patch:
        patch.setattr(grow_model, "write_files", full)
        assert run_guarded(grow, words) == 2
    with watched(tmp_path / "out") as paths:
        assert run_guarded(grow, words) == 0
        assert run_guarded(grow, words) == 0
    assert {"progress.pt", "settings.json", "result.json"} <= paths
    assert unknown(paths) == []


def test_an_unknown_kind_of_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "round-000001.pt"
    path.write_bytes(b"")
    with watched(tmp_path) as paths, pytest.raises(UsageError):
        replay(path)
    assert unknown(paths) == ["round-000001.pt"]
