"""Commands on damaged, vanishing, forged and unwritable files: one line, and nothing good lost."""

import errno
import io
import math
import os
import pickle
import random
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline import disk
from esper.leyline.disk import lock_file
from esper.leyline.errors import UsageError
from esper.scripts import grow_model, grown_files, query
from esper.scripts.grow import grow
from esper.scripts.main import esper
from esper.simic.run.run_directory import cut_events
from own_modules import SOURCE
from processes import refusal

FLIPS, CUTS = 40, 10


@pytest.fixture
def command(tmp_path: Path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(grown_files, "_write_programs", lambda *_: {})
    return ["--model", str(path), "--policy", "never", "--epochs", "2", "--out", "out"]


def stopped_after_growth(command: list[str], capsys) -> Path:
    """The folder of a command whose files could not be written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grow_model, "write_files", full)
        assert "make room" in refusal(capsys, grow, *command, prints=True)
    return Path("out")


def full(*_: Any, **__: Any) -> int:
    raise UsageError("out: the disk is full; make room")


def damaged_copies(content: bytes) -> list[bytes]:
    """Copies with one bit flipped, and copies that are cut off."""
    draw = random.Random(37)
    copies = []
    for _ in range(FLIPS):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        copies.append(bytes(flipped))
    return copies + [content[: draw.randrange(len(content))] for _ in range(CUTS)]


@pytest.mark.parametrize("name", ["progress.pt", "settings.json"])
def test_a_damaged_file_of_a_stopped_growth_is_one_line(
    name: str, command: list[str], capsys
) -> None:
    path = stopped_after_growth(command, capsys) / name
    for copy in damaged_copies(path.read_bytes()):
        path.write_bytes(copy)
        assert f"{path} is damaged" in refusal(capsys, grow, *command, prints=True)
        assert path.read_bytes() == copy


def test_a_damaged_result_is_one_line(command: list[str], capsys) -> None:
    assert [grow(command), grow(command)] == [0, 0]
    assert "was finished before; remove it to grow anew" in capsys.readouterr().out
    path = Path("out/result.json")
    for copy in [*damaged_copies(path.read_bytes()), b"{"]:
        path.write_bytes(copy)
        error = refusal(capsys, grow, *command)
        assert re.match(rf"esper: out: {path} is damaged \(.*\); remove .* to grow", error), error


@pytest.mark.parametrize(
    ("name", "entry", "value", "advice"),
    [
        ("result.json", "status", 2**31, "remove out to grow anew"),
        ("result.json", "grown", [], "remove out to grow anew"),
        ("settings.json", "sha256", 1.5, "the file changed since growth in out began"),
        ("settings.json", "sha256", {}, "the file changed since growth in out began"),
    ],
)
def test_a_forged_entry_with_a_valid_seal_is_one_line(
    name: str, entry: str, value: Any, advice: str, command: list[str], capsys
) -> None:
    assert grow(command) == 0
    capsys.readouterr()
    path = Path("out", name)
    disk.replace_sealed_json(path, disk.read_sealed_json(path) | {entry: value})
    assert advice in refusal(capsys, grow, *command)


def test_the_second_writer_of_a_folder_is_refused(command: list[str], capsys) -> None:
    Path("out").mkdir()
    with lock_file(Path("out/lock")):
        assert "another process works in out" in refusal(capsys, grow, *command)
    assert grow(command) == 0
    assert not Path("out/lock").exists()


def test_a_folder_removed_in_mid_run_is_one_line(command: list[str], capsys, monkeypatch) -> None:
    original = grow_model.grow

    def removing(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree("out")
        return original(*arguments, **options)

    monkeypatch.setattr(grow_model, "grow", removing)
    assert "cannot write" in refusal(capsys, grow, *command, prints=True)
    assert not Path("out").exists()


@pytest.mark.parametrize("failing", ["state_dict", "rebuild", "growth", "result"])
def test_a_disk_that_fills_while_files_are_written_is_one_line(
    failing: str, command: list[str], capsys, monkeypatch
) -> None:
    """The rerun writes what the undisturbed command would have written."""
    assert grow([*command[:-1], "whole"]) == 0
    capsys.readouterr()
    original = disk.write_synced

    def write(path: Path, content: bytes) -> None:
        if path.stem == failing:
            path.write_bytes(content[:9])
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_synced", write)
        error = refusal(capsys, grow, *command, prints=True)
    assert "cannot write into out (No space left on device)" in error
    assert not list(Path("out").glob(f"{failing}.*"))
    assert grow(command) == 0
    for name in ("state_dict.pt", "rebuild.py"):
        assert Path("out", name).read_bytes() == Path("whole", name).read_bytes()


def test_a_difference_that_is_not_a_number_is_no_success(
    command: list[str], capsys, monkeypatch
) -> None:
    monkeypatch.setattr(grown_files, "difference", lambda *_: math.nan)
    assert grow(command) == 1
    assert "differs from the network by nan" in capsys.readouterr().err
    assert not Path("out/result.json").exists()


def test_a_line_of_brackets_is_cut_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"round": 1}\n' + b"[" * 5000 + b"\n")
    cut_events(tmp_path, 13, 1)
    assert (tmp_path / "events.jsonl").read_bytes() == b'{"round": 1}\n'


def old_archive(path: Path) -> None:
    """A file in the tar format of torch's first versions."""
    content = pickle.dumps(1, protocol=2)
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save({"schema": re.compile("x")}, path),
        lambda path: torch.jit.script(torch.nn.Linear(1, 1)).save(path),
        old_archive,
        lambda path: path.write_bytes(pickle.dumps(re.compile("x"), protocol=4)),
    ],
    ids=["object", "script", "tar", "pickle"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_replay_does_not_advise_to_switch_safety_off(write, tmp_path: Path, capsys) -> None:
    path = tmp_path / "round-000001.pt"
    write(path)
    error = refusal(capsys, esper, "replay", str(path))
    assert "it holds more than tensors" in error
    assert "weights_only" not in error


@pytest.mark.parametrize("entry", ["settings", "random", "variants", "begun"])
def test_a_stopped_growth_without_an_entry_does_not_blame_the_model(
    entry: str, command: list[str], capsys
) -> None:
    path = stopped_after_growth(command, capsys) / "progress.pt"
    content = torch.load(io.BytesIO(disk.read_sealed(path)), weights_only=True)
    del content[entry]
    buffer = io.BytesIO()
    torch.save(content, buffer)
    disk.replace_sealed(path, buffer.getvalue())
    assert f"checkpoint: {path} is damaged" in refusal(capsys, grow, *command, prints=True)


def test_a_query_that_fails_keeps_the_previous_output(tmp_path: Path) -> None:
    target = tmp_path / "result.csv"
    target.write_text("good")

    def cut() -> None:
        with query._replacement(target) as draft:
            draft.write_text("cu")
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        cut()
    assert target.read_text() == "good"
    assert list(tmp_path.iterdir()) == [target]
    with query._replacement(target) as draft:
        draft.write_text("better")
    assert target.read_text() == "better"
    with query._replacement(Path(os.devnull)) as device:
        assert device == Path(os.devnull)


@pytest.mark.parametrize(
    "words",
    [
        ["grow", "--model", "mine.py", "--policy", "never", "--out", "x" * 5000],
        ["grow", "--model", "mine.py", "--policy", "x" * 5000],
        ["evaluate", "--policy", "x" * 5000],
    ],
)
def test_names_that_are_too_long_are_one_line(words: list[str], command: list[str], capsys) -> None:
    assert "too long" in refusal(capsys, esper, *words)


def test_a_model_that_cannot_be_traced_has_no_program_and_all_other_files(
    command: list[str], capsys, monkeypatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("data-dependent control flow\nand more")

    monkeypatch.undo()
    monkeypatch.chdir(Path(command[1]).parent)
    monkeypatch.setattr(grown_files, "export", fails)
    assert grow(command) == 0
    out = capsys.readouterr().out
    assert "no model.pt2: torch.export cannot trace the model (data-dependent control flow)" in out
    names = {path.name for path in Path("out").iterdir()}
    assert {"state_dict.pt", "rebuild.py", "result.json", "settings.json"} <= names
    assert "model.pt2" not in names


@pytest.mark.parametrize(
    ("words", "epochs"),
    [([], None), (["--schedule", "cosine"], 2), (["--schedule", "constant"], 0)],
)
def test_a_schedule_is_passed_on_where_one_is_named(
    words: list[str], epochs: int | None, command: list[str], monkeypatch
) -> None:
    options: dict[str, Any] = {}

    def growing(*_: Any, **more: Any) -> Any:
        options.update(more)
        raise UsageError("enough")

    monkeypatch.setattr(grow_model, "grow", growing)
    with pytest.raises(UsageError, match="enough"):
        grow([*command, *words])
    assert ("scheduler" in options) == (epochs is not None)
    if epochs == 0:
        assert options["scheduler"] is None
    elif epochs is not None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        assert options["scheduler"](optimizer).T_max == epochs
