"""Sealed files: every flipped bit and every cut is noticed; a file is replaced whole or not."""

import errno
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from esper.leyline import disk
from esper.leyline.disk import (
    DamagedFile,
    lock_file,
    read_sealed,
    read_sealed_json,
    replace_sealed,
    replace_sealed_json,
)

CONTENT = b"some\ncontent\x00 of a file\n"
ENTRIES = {"text": "größer", "numbers": [1.5, None, True], "nested": {"b": 1, "a": 2}}
KINDS: list[tuple[Callable[[Path], None], Callable[[Path], object], object]] = [
    (lambda path: replace_sealed(path, CONTENT), read_sealed, CONTENT),
    (lambda path: replace_sealed_json(path, ENTRIES), read_sealed_json, ENTRIES),
]
each_kind = pytest.mark.parametrize(("write", "read", "content"), KINDS, ids=["bytes", "JSON"])


@each_kind
def test_every_flipped_bit_and_every_cut_is_noticed(write, read, content, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path)
    assert read(path) == content
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedFile):
            read(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFile):
            read(path)


@each_kind
def test_no_random_bytes_are_taken_for_a_sealed_file(write, read, content, tmp_path: Path) -> None:
    draw = random.Random(0)
    path = tmp_path / "file"
    for content in (b"", b"[" * 5000, b"null", b"[]", json.dumps(ENTRIES).encode()):
        path.write_bytes(content)
        with pytest.raises(DamagedFile):
            read(path)
    for _ in range(100):
        path.write_bytes(draw.randbytes(draw.randrange(200)))
        with pytest.raises(DamagedFile):
            read(path)


def full(draft: Path, content: bytes) -> None:
    draft.write_bytes(content[:5])
    raise OSError(errno.ENOSPC, "No space left on device")


@each_kind
@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (full, "No space left"),
        (lambda draft, _: draft.write_bytes(b"other"), "does not read back as written"),
    ],
    ids=["full disk", "other bytes"],
)
def test_what_cannot_be_written_leaves_the_previous_file(
    write, read, content, writer, message: str, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "file"
    write(path)
    monkeypatch.setattr(disk, "write_synced", writer)
    with pytest.raises(OSError, match=message):
        write(path)
    assert read(path) == content
    assert list(tmp_path.iterdir()) == [path]


@each_kind
def test_the_new_name_is_on_the_disk_too(write, read, content, tmp_path: Path, monkeypatch) -> None:
    synced, sync = [], disk.sync
    monkeypatch.setattr(disk, "sync", lambda path: (synced.append(path), sync(path)))
    write(tmp_path / "file")
    assert synced == [tmp_path]


def test_the_second_writer_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with lock_file(tmp_path / "lock"), pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    lock_file(tmp_path / "lock").close()
