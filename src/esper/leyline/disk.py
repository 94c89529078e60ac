"""Writes that reach the disk, and what Esper reads back: one seal and one lock.

A file is replaced atomically, so that the old one or the new one is left. A sealed file begins with
a line that holds the SHA-256 of what follows, or, as JSON, holds its own as an entry.
"""

import errno
import fcntl
import hashlib
import json
import os
import random
import stat
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

_FIRST_WORDS = b"esper sealed "
CHECKSUM = "checksum"
"""The entry of a sealed JSON file that holds the SHA-256 of the others."""


class DamagedFile(ValueError):
    """A file differs from what was written; the message says in one line how."""


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk.

    Raises:
        OSError: the disk failed or is full.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush its content to the disk.

    Raises:
        OSError: the disk failed or is full.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, content: bytes) -> None:
    """Replace a file atomically; if that fails, the previous file stays.

    Raises:
        OSError: the disk failed or is full.
    """
    draft = path.with_suffix(".draft")
    try:
        write_synced(draft, content)
        if draft.read_bytes() != content:
            raise OSError(errno.EIO, "it does not read back as written", str(path))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def read_regular(path: Path, most: int) -> bytes:
    """Read a file of at most ``most`` bytes; a pipe or a device is not opened for reading.

    Raises:
        OSError: it is no regular file, is larger, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, "larger than its manifest says", str(path))
        return file.read(status.st_size)


def replace_sealed(path: Path, content: bytes) -> None:
    """Replace a file atomically by ``content`` behind a line with its checksum.

    Raises:
        OSError: the disk failed or is full; the previous file stays.
    """
    replace_synced(path, _first_line(content) + content)


def read_sealed(path: Path) -> bytes:
    """The content that ``replace_sealed`` wrote.

    Raises:
        DamagedFile: the file differs from what was written.
        OSError: it cannot be read.
    """
    sealed = read_regular(path, sys.maxsize)
    first, _, content = sealed.partition(b"\n")
    if not first.startswith(_FIRST_WORDS):
        raise DamagedFile("it has no checksum")
    if first + b"\n" != _first_line(content):
        raise DamagedFile("its checksum does not match")
    return content


def _first_line(content: bytes) -> bytes:
    return _FIRST_WORDS + hashlib.sha256(content).hexdigest().encode() + b"\n"


def replace_sealed_json(path: Path, entries: dict[str, Any]) -> None:
    """Replace a file atomically by ``entries`` and their checksum, see ``sealed_json``.

    Raises:
        OSError: the disk failed or is full; the previous file stays.
    """
    replace_synced(path, sealed_json(entries))


def read_sealed_json(path: Path) -> dict[str, Any]:
    """The entries that ``replace_sealed_json`` wrote.

    Raises:
        DamagedFile: the file differs from what was written.
        OSError: it cannot be read.
    """
    return unsealed_json(read_regular(path, sys.maxsize))


def sealed_json(entries: dict[str, Any], key: str = CHECKSUM) -> bytes:
    """The text of a JSON file with its own checksum under ``key``."""
    seal = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    return (json.dumps(entries | {key: seal}, indent=2) + "\n").encode()


def unsealed_json(content: bytes, key: str = CHECKSUM) -> dict[str, Any]:
    """The inverse of ``sealed_json``.

    Raises:
        DamagedFile: ``content`` is no such text, or a byte of it differs.
    """
    try:
        entries: dict[str, Any] = json.loads(content)
        del entries[key]
        # Compare every byte: a checksum of the entries would not detect a missing newline.
        intact = sealed_json(entries, key) == content
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile("it is cut off or has no checksum") from error
    if not intact:
        raise DamagedFile("its checksum does not match")
    return entries


def lock_file(path: Path) -> BinaryIO:
    """Open and lock the file ``path``, creating it if it is missing.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: it cannot be written or locked.
    """
    while True:
        file = path.open("ab")
        try:
            _lock_for_writing(file)
            # A process that abandoned the directory may have removed the file opened here.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except OSError:
            file.close()
            raise
        file.close()


def _lock_for_writing(file: BinaryIO) -> None:
    """Take the exclusive lock; commands that read the run hold a shared one for microseconds.

    Raises:
        BlockingIOError: another process writes.
        OSError: the file cannot be locked.
    """
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # Refused as well if another process writes, and granted beside readers.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(random.uniform(0.0, 0.002))
