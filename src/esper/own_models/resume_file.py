"""The file from which ``grow`` resumes: written after every epoch, read when growth begins."""

import io
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.leyline.disk import replace_synced
from esper.leyline.errors import UsageError
from esper.own_models.samples import loader_generators

FORMAT = 1
"""Version of what the file holds."""


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
        replace_synced(path, content.getvalue())
    except OSError as error:
        kept = "; the file of the epoch before stays" if path.exists() else ""
        raise UsageError(
            f"checkpoint: cannot write {path} ({error.strerror}){kept}; make room and start again"
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
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        known = checkpoint["format"]
    except Exception as error:
        # What a damaged file raises is undocumented.
        raise UsageError(
            f"checkpoint: {path} is damaged or not a checkpoint of grow; remove it to begin anew"
        ) from error
    if known != FORMAT:
        raise UsageError(
            f"checkpoint: {path} has format {known}, this version writes {FORMAT}; "
            "remove it to begin anew"
        )
    for name, given in settings.items():
        began = checkpoint["settings"].get(name)
        if began != given:
            if name == "model":
                began, given = "other parameters", "these"
            raise UsageError(
                f"{name}: growth in {path} began with {began}, got {given}; give that, or "
                "another file"
            )
    return checkpoint


def random_state(loaders: Iterable[object]) -> dict[str, Any]:
    """The states of torch's, numpy's and python's generators, and of those of the loaders."""
    arrays: Any = np.random.get_state()
    name, keys, *rest = arrays
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
        "loaders": [generator.get_state() for generator in loader_generators(loaders)],
    }


def set_random_state(state: dict[str, Any], loaders: Iterable[object]) -> None:
    """The inverse of ``random_state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    for generator, own in zip(loader_generators(loaders), state["loaders"], strict=True):
        generator.set_state(own)
