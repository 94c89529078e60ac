"""Names of the files in a run directory that both its writer and its readers know, and its lock."""

import re
from pathlib import Path
from typing import BinaryIO

from esper.leyline.disk import lock_file
from esper.leyline.errors import UsageError

_ROUND = re.compile("[0-9]{6,18}")


def is_round(name: str) -> bool:
    """Whether a folder under ``checkpoints`` has the name of a round's checkpoint."""
    return _ROUND.fullmatch(name) is not None


EVENTS_LOCK = "events.lock"
"""Lock of the process that grows a module of the user's own and writes its events."""
LADDERS = "ladders"
"""Folder with the evaluations of its policy, one file per suite."""


def lock_folder(folder: Path, name: str, setting: str) -> BinaryIO:
    """Make a folder in which one process works, and lock its file ``name``.

    Raises:
        UsageError: another process works in it, or it cannot be written; the text names
            ``setting``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_file(folder / name)
    except BlockingIOError as error:
        raise UsageError(
            f"{setting}: another process works in {folder}; wait until it has ended, or give "
            "another"
        ) from error
    except OSError as error:
        raise UsageError(
            f"{setting}: cannot use {folder} ({error.strerror}); give another folder"
        ) from error
