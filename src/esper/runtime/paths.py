"""Paths as users write them."""

import os
from pathlib import Path


def absolute_path(path: str | Path) -> str:
    """The absolute path without links, which names the same file from any directory.

    Raises:
        ValueError: it contains a null byte.
    """
    return os.path.realpath(os.path.expanduser(path))
