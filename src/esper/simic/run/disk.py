"""Writing so that a crash, of the process or of the machine, finds either the old or the new."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make sure a file or the names in a directory are on the disk.

    Raises:
        OSError: the disk failed or is full.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and make sure that its content is on the disk.

    Raises:
        OSError: the disk failed or is full.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, content: bytes) -> None:
    """Put a file in the place of the one before, which stays where this fails.

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
