"""Checkpoints on a disk that flips bits, truncates files or is full, and forged checkpoints."""

import copy
import errno
import hashlib
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError
from esper.simic.run import checkpoint
from esper.simic.run.checkpoint import load_latest, save
from esper.simic.run.identity import Identity
from esper.simic.run.unusable_run import UnusableRun
from small_runs import assert_same

IDENTITY = Identity(run="this one", settings={"envs": 2, "slots": ["early"]}, data={"a": "b"})
FILES = ("policy.pt", "counters.pt", "manifest.json")


def parts(round_number: int) -> dict[str, dict[str, Any]]:
    """The parts of a small agent after a round."""
    weights = torch.arange(24.0).reshape(4, 6) / round_number
    return {
        "policy": {"weight": weights, "bias": weights[0]},
        "counters": {"updates": torch.tensor(round_number)},
    }


def saved(run: Path, rounds: int, keep: int = 100) -> Path:
    run.mkdir(exist_ok=True)
    for number in range(1, rounds + 1):
        save(run, number, parts(number), 10 * number, keep, IDENTITY)
    return run


def rounds_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with intact checkpoints of rounds 1 and 2."""
    return saved(tmp_path / "run", 2)


def assert_passed_over(run: Path, capsys) -> None:
    """The checkpoint of round 2 is skipped, that of round 1 is used, and one line reports it."""
    found = load_latest(run)
    assert (found.round, found.events_bytes) == (1, 10)
    assert_same(found.parts, parts(1))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint: {run}/checkpoints/000002 is corrupt (")
    assert line.endswith("); using that of round 000001")
    assert len(line) < 400


def test_what_was_saved_is_loaded(run: Path, capsys) -> None:
    found = load_latest(run)
    assert (found.round, found.events_bytes, found.blueprints) == (2, 20, BLUEPRINTS)
    assert_same(found.parts, parts(2))
    assert capsys.readouterr().err == ""


# --- a disk that changes what it was given ----------------------------------------------------


def sample(bits: dict[str, int], count: int) -> list[tuple[str, int]]:
    """``count`` positions, equally many in each file."""
    draw = random.Random(3)
    return [(FILES[i % 3], draw.randrange(bits[FILES[i % 3]])) for i in range(count)]


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def truncated(content: bytes, length: int) -> bytes:
    return content[:length]


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("damaged", "units", "stride", "count"),
    # Every ninth bit covers all positions within a byte; testing all would take minutes.
    [(flipped, 8, 9, 96), (truncated, 1, 1, 48)],
    ids=["flipped bit", "truncation"],
)
def test_every_flipped_bit_and_truncation_is_detected(
    run: Path, damaged, units: int, stride: int, count: int, exhaustive: bool, capsys
) -> None:
    newest = run / "checkpoints" / "000002"
    sizes = {name: units * (newest / name).stat().st_size for name in FILES}
    every = [(name, place) for name in FILES for place in range(0, sizes[name], stride)]
    ends = [(name, place) for name in FILES for place in (0, sizes[name] - 1)]
    for name, place in every if exhaustive else ends + sample(sizes, count):
        content = (newest / name).read_bytes()
        (newest / name).write_bytes(damaged(content, place))
        assert_passed_over(run, capsys)
        (newest / name).write_bytes(content)
    assert load_latest(run).round == 2


def removed(path: Path) -> Path:
    path.unlink()
    return path


def of_another_round(newest: Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("000001"), newest)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no file at all": lambda newest: [path.unlink() for path in newest.iterdir()],
    "the checkpoint of another round": of_another_round,
    "a pipe": lambda newest: os.mkfifo(removed(newest / "policy.pt")),
    "a device": lambda newest: removed(newest / "policy.pt").symlink_to("/dev/zero"),
    "a manifest of a gigabyte": lambda newest: os.truncate(newest / "manifest.json", 2**30),
}
DAMAGE_OF_A_FILE: dict[str, Callable[[Path], object]] = {
    "missing": removed,
    "a directory": lambda path: removed(path).mkdir(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_detected(run: Path, kind: str, capsys) -> None:
    DAMAGE[kind](run / "checkpoints" / "000002")
    assert_passed_over(run, capsys)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", DAMAGE_OF_A_FILE)
def test_a_damaged_file_is_detected(run: Path, name: str, kind: str, capsys) -> None:
    DAMAGE_OF_A_FILE[kind](run / "checkpoints" / "000002" / name)
    assert_passed_over(run, capsys)


def test_without_an_intact_checkpoint_one_line_names_the_damage(run: Path) -> None:
    for name in ("000001", "000002"):
        (run / "checkpoints" / name / "policy.pt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"000002 is corrupt \(checksum of policy\.pt") as found:
        load_latest(run)
    assert "\n" not in str(found.value)
    assert "no intact checkpoint" in str(found.value)


# --- forged checkpoints with valid checksums --------------------------------------------------


def forge(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of round 2 and update its checksum."""
    path = run / "checkpoints" / "000002" / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    fields.pop("manifest_sha256", None)
    seal = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(fields | {"manifest_sha256": seal}, indent=2) + "\n")


def replaced(run: Path, content: bytes) -> None:
    """Put another file in the place of a part of round 2, with the right checksum."""
    (run / "checkpoints" / "000002" / "policy.pt").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()

    def change(fields: dict[str, Any]) -> None:
        fields["sha256"]["policy.pt"], fields["bytes"]["policy.pt"] = digest, len(content)

    forge(run, change)


def saved_as_bytes(content: object, **settings: bool) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **settings)
    return file.getvalue()


def test_a_forged_manifest_with_valid_fields_is_accepted(run: Path) -> None:
    forge(run, lambda fields: fields.update(events_bytes=21))
    assert load_latest(run).events_bytes == 21


class Malicious:
    """Creates the file that it names when it is unpickled."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_malicious_pickle_is_refused_and_not_executed(
    run: Path, tmp_path: Path, legacy: bool, capsys
) -> None:
    target = tmp_path / "executed"
    weight = {"weight": Malicious(target)}
    content = saved_as_bytes(weight, _use_new_zipfile_serialization=not legacy)
    torch.load(io.BytesIO(content), weights_only=False)
    assert target.is_dir(), "the pickle would be executed"
    target.rmdir()
    replaced(run, content)
    assert_passed_over(run, capsys)
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", b"\x80\x02].", b"\0" * 4096, saved_as_bytes([torch.zeros(2)])],
    ids=["empty", "begun", "a pickle", "zeros", "a list"],
)
def test_a_part_without_named_tensors_is_refused(run: Path, content: bytes, capsys) -> None:
    replaced(run, content)
    assert_passed_over(run, capsys)


OUTSIDE = ("../000001/policy.pt", "/etc/passwd", "..", "", ".pt", "a/b.pt", "a\0.pt", "x" * 5000)
WRONG: dict[str, tuple[object, ...]] = {
    "round": (None, "2", 2.5, [2], {}, True, -1, 10**30, 1),
    "events_bytes": (None, "20", 2.5, [], -1, True),
    "blueprints": (None, "noop", 3, [1], {"a": 1}),
    "torch": (None, 2, []),
    "sha256": (None, "x", [], [["policy.pt", "x"]], {"policy.pt": 3}, {"policy.pt": None}),
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in WRONG.items() for v in values]
)
def test_a_forged_manifest_is_refused(run: Path, field: str, value: object, capsys) -> None:
    forge(run, lambda fields: fields.update({field: value}))
    assert_passed_over(run, capsys)


@pytest.mark.parametrize("size", [2**63, 10**30])
def test_a_file_may_claim_any_size(run: Path, size: int) -> None:
    """No more than the file has is read, so the size does no harm."""
    forge(run, lambda fields: fields["bytes"].update({"policy.pt": size}))
    assert load_latest(run).round == 2


@pytest.mark.parametrize("field", WRONG)
def test_a_manifest_without_a_field_is_refused(run: Path, field: str, capsys) -> None:
    forge(run, lambda fields: fields.pop(field))
    assert_passed_over(run, capsys)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_other_files_is_refused(run: Path, name: str, capsys) -> None:
    digest = hashlib.sha256((run / "checkpoints/000001/policy.pt").read_bytes()).hexdigest()
    forge(run, lambda fields: fields["sha256"].update({name: digest}))
    assert_passed_over(run, capsys)


def test_an_unknown_field_is_refused_in_one_line(run: Path, capsys) -> None:
    forge(run, lambda fields: fields.update({"\n" * 1000: 1}))
    assert_passed_over(run, capsys)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"null", b"[]", b'"text"', b"7", b"{}", b"\xff\xfe", b"[" * 100_000,
        b'{"a":' * 100_000, b"1" * 10_000, b'{"manifest_sha256": 1e999}',
        b'{"manifest_sha256": null, "schema": 2}',
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_the_manifest_may_contain_any_text(run: Path, text: bytes, capsys) -> None:
    (run / "checkpoints" / "000002" / "manifest.json").write_bytes(text)
    assert_passed_over(run, capsys)


@pytest.mark.parametrize(
    "schema", [checkpoint.SCHEMA_VERSION + 1, None, "2", 10**40, [[]], "x" * 999]
)
def test_another_schema_is_reported_as_another_version(run: Path, schema: object) -> None:
    """Using an older checkpoint instead would discard rounds."""
    forge(run, lambda fields: fields.update(schema=schema, something_new=1))
    with pytest.raises(UsageError, match=r"000002 has schema .*resume with the version that") as e:
        load_latest(run)
    assert len(str(e.value)) < 400


# --- which checkpoints are kept ---------------------------------------------------------------


def test_only_the_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert rounds_of(saved(tmp_path / "run", 5, keep=2)) == ["000004", "000005"]


@pytest.mark.parametrize("keep", [1, 2])
def test_corrupt_checkpoints_do_not_replace_an_intact_one(
    tmp_path: Path, keep: int, capsys
) -> None:
    """Rounds 4 and 5 are corrupt, so the run resumes from round 2 and saves round 3 next."""
    run = saved(tmp_path / "run", 5)
    shutil.rmtree(run / "checkpoints" / "000003")
    for name in ("000004", "000005"):
        (run / "checkpoints" / name / "policy.pt").write_bytes(b"")
    assert load_latest(run).round == 2
    assert capsys.readouterr().err.count("is corrupt") == 2
    save(run, 3, parts(3), 30, keep, IDENTITY)
    assert rounds_of(run) == ["000002", "000003"][-keep:]
    assert load_latest(run).round == 3


def test_a_corrupt_checkpoint_of_the_same_round_is_replaced(run: Path) -> None:
    (run / "checkpoints" / "000002" / "policy.pt").unlink()
    (run / "checkpoints" / "000002" / "stray").mkdir()
    save(run, 2, parts(2), 20, 3, IDENTITY)
    assert_same(load_latest(run).parts, parts(2))


def test_files_of_a_killed_save_are_removed_by_the_next_save(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "000002", run / "checkpoints" / ".draft-000009")
    assert load_latest(run).round == 2
    save(run, 3, parts(3), 30, 3, IDENTITY)
    assert rounds_of(run) == ["000001", "000002", "000003"]


# --- a disk that fails ------------------------------------------------------------------------


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "where", ["pathlib.Path.mkdir", "pathlib.Path.open", "os.fsync", "pathlib.Path.rename"]
)
@pytest.mark.parametrize("keep", [1, 3])
def test_a_failed_save_keeps_earlier_checkpoints(
    run: Path, where: str, keep: int, monkeypatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, full)
        with pytest.raises(OSError, match="No space left"):
            save(run, 3, parts(3), 30, keep, IDENTITY)
    assert rounds_of(run) == ["000001", "000002"], "no draft is left either"
    assert_same(load_latest(run).parts, parts(2))
    save(run, 3, parts(3), 30, keep, IDENTITY)
    assert load_latest(run).round == 3


def test_a_disk_that_corrupts_a_write_is_detected(run: Path, monkeypatch) -> None:
    """The read-back finds the damage before earlier checkpoints are removed."""
    original = checkpoint.write_synced

    def faulty(path: Path, content: bytes) -> None:
        changed = bytearray(content)
        changed[len(content) // 2] ^= 4
        original(path, bytes(changed) if path.name == "policy.pt" else content)

    monkeypatch.setattr(checkpoint, "write_synced", faulty)
    with pytest.raises(OSError, match="cannot be read back"):
        save(run, 3, parts(3), 30, 1, IDENTITY)
    assert rounds_of(run) == ["000001", "000002"]


# --- files that would take more than they are -------------------------------------------------


def compressed() -> bytes:
    """A few kilobytes of an archive can stand for gigabytes."""
    content, packed = saved_as_bytes(parts(2)["policy"]), io.BytesIO()
    with ZipFile(io.BytesIO(content)) as whole, ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))
    return packed.getvalue()


def allocating() -> bytes:
    """Torch permits ``bytearray(n)`` in what it calls weights only."""
    return saved_as_bytes({"weight": bytearray(8)})


def overlapping() -> bytes:
    """Entries that share their bytes take more memory than the file is large."""
    doubled = io.BytesIO(saved_as_bytes({"weight": torch.zeros(10_000)}))
    with ZipFile(doubled, "a") as archive:
        for entry in list(archive.filelist):
            again = copy.copy(entry)
            again.filename = f"{entry.filename}_again"
            archive.filelist.extend([again] * 3)
        archive._didModify = True  # type: ignore[attr-defined]
    return doubled.getvalue()


@pytest.mark.parametrize("archive", [compressed, allocating, overlapping])
def test_an_archive_that_takes_more_than_it_is_is_refused_before_it_is_read(
    run: Path, archive: Callable[[], bytes], capsys, monkeypatch
) -> None:
    content = archive()
    replaced(run, content)
    loaded = sizes_loaded(monkeypatch)
    assert_passed_over(run, capsys)
    assert len(content) not in loaded


def sizes_loaded(monkeypatch) -> list[int]:
    """The sizes of all files that torch is given from now on."""
    sizes: list[int] = []
    load = torch.load

    def noted(file: io.BytesIO, **named: Any) -> Any:
        sizes.append(len(file.getvalue()))
        return load(file, **named)

    monkeypatch.setattr(torch, "load", noted)
    return sizes


def test_a_file_is_not_read_beyond_the_size_in_the_manifest(run: Path, monkeypatch) -> None:
    limits: dict[str, int] = {}
    read = checkpoint.read_regular

    def noted(path: Path, most: int) -> bytes:
        limits[path.name] = most
        return read(path, most)

    monkeypatch.setattr(checkpoint, "read_regular", noted)
    load_latest(run)
    folder = run / "checkpoints" / "000002"
    for name in ("policy.pt", "counters.pt"):
        assert limits[name] == (folder / name).stat().st_size
    assert limits["manifest.json"] < 2**30


def test_torch_would_refuse_a_malicious_pickle_as_well(run: Path, capsys, monkeypatch) -> None:
    """Each of the two checks is enough without the other."""
    target = run.parent / "executed"
    replaced(run, saved_as_bytes({"weight": Malicious(target)}))
    monkeypatch.setattr(checkpoint, "_check_archive", lambda content: None)
    assert_passed_over(run, capsys)
    assert not target.exists()


# --- order, blueprints and the disk -----------------------------------------------------------


def test_the_millionth_round_is_later_than_the_one_before(tmp_path: Path) -> None:
    tmp_path.joinpath("run").mkdir()
    for number in (999_999, 1_000_000):
        save(tmp_path / "run", number, parts(number), 0, 5, IDENTITY)
    assert load_latest(tmp_path / "run").round == 1_000_000


def test_a_policy_for_other_blueprints_is_refused(run: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "BLUEPRINTS", [*BLUEPRINTS, "own"])
    with pytest.raises(UsageError, match=r"has other blueprints \(own not in the checkpoint\)"):
        load_latest(run)


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch) -> None:
    """Files and their folder before the rename, the entries of the folders above after it."""
    flush, rename, done = os.fsync, Path.rename, list[str]()

    def flushed(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    saved(tmp_path / "run", 1)
    draft = ".draft-000001"
    assert done == ["run", *FILES, draft, f"{draft} -> 000001", "checkpoints"]


def test_another_setting_names_an_unusable_run_without_its_field(tmp_path: Path) -> None:
    with pytest.raises(UnusableRun, match=r"^resume: .* has no checkpoint; start a new run") as e:
        load_latest(tmp_path)
    assert e.value.reason == f"{tmp_path} has no checkpoint"
    again = pickle.loads(pickle.dumps(e.value))
    assert (str(again), again.reason) == (str(e.value), e.value.reason)
