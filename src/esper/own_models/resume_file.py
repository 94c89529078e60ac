"""The file from which ``grow`` resumes."""

import io
from pathlib import Path
from typing import Any

import torch

from esper.leyline.disk import read_sealed, replace_sealed
from esper.leyline.errors import UsageError

FORMAT = 2
"""Version of what the file holds."""
ENTRIES = {"settings", "initial", "begun", "now", "scale", "random", "variants"}
"""What it holds beside the format."""


def check_folder(path: Path) -> None:
    """Refuse a file that could not be written.

    Raises:
        UsageError: its folder does not exist.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"checkpoint: cannot write {path}; give a file in a folder that exists")


def write(path: Path, checkpoint: dict[str, Any]) -> None:
    """Replace the file atomically: a process that is killed leaves the old one or the new one.

    Raises:
        UsageError: the disk failed or is full; the old file stays.
    """
    content = io.BytesIO()
    torch.save({"format": FORMAT, **checkpoint}, content)
    try:
        replace_sealed(path, content.getvalue())
    except OSError as error:
        note = "; the file of the epoch before stays" if path.exists() else ""
        raise UsageError(
            f"checkpoint: cannot write {path} ({error.strerror}){note}; make room and start again"
        ) from error


def read(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What ``write`` wrote; None if there is no file.

    Args:
        path: the file.
        settings: settings of this call, which must be those that began the file.

    Raises:
        UsageError: it cannot be read, or belongs to other settings.
    """
    if not path.exists():
        return None
    try:
        content = io.BytesIO(read_sealed(path))
        checkpoint: dict[str, Any] = torch.load(content, weights_only=True, map_location="cpu")
        version, stored_settings = checkpoint["format"], dict(checkpoint["settings"])
        if missing := ENTRIES - checkpoint.keys():
            raise KeyError(*missing)
    except Exception as error:
        # What a damaged file raises is undocumented.
        raise UsageError(
            f"checkpoint: {path} is damaged or not a checkpoint of grow; remove it to begin anew"
        ) from error
    if version != FORMAT:
        raise UsageError(
            f"checkpoint: {path} has format {version}, this version writes {FORMAT}; "
            "remove it to begin anew"
        )
    for name, value in settings.items():
        began = stored_settings.get(name)
        if str(began) != str(value):
            if name == "model":
                began, value = "other parameters", "these"
            raise UsageError(
                f"{name}: growth in {path} began with {began}, got {value}; give that, or "
                "another file"
            )
    return checkpoint
