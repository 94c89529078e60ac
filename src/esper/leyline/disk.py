"""Writes that reach the disk, and an atomic replacement that leaves the old file or the new one."""

import errno
import os
import stat
from pathlib import Path


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
