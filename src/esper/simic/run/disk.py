"""Writes that reach the disk, and an atomic replacement that leaves the old file or the new one."""

import os
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
