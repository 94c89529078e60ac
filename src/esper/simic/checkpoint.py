"""Checkpoints: atomic, checksummed, and readable by eye in their manifest.

A checkpoint is a directory of ``*.pt`` files and a ``manifest.json``. It is written under another
name, synced and renamed, so a directory with the right name is whole; the checksums find what the
disk did to it afterwards.
"""

import hashlib
import json
import os
import pickle
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError
from esper.simic.ppo import PPOAgent

SCHEMA_VERSION = 2
_MANIFEST = "manifest.json"
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)
"""What reading a damaged checkpoint may raise."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    Attributes:
        path: its directory.
        round: rounds that were done.
        events_bytes: length of the event file at that time.
        blueprints: options of the policy's blueprint head.
        parts: nested dictionaries of tensors by part name.
    """

    path: Path
    round: int
    events_bytes: int
    blueprints: list[str]
    parts: dict[str, dict[str, Any]]


def agent_parts(agent: PPOAgent[Any]) -> dict[str, dict[str, Any]]:
    """Everything an agent has to remember, by part; optimizer state by parameter name."""
    return agent.state()


def restore_agent(agent: PPOAgent[Any], parts: dict[str, dict[str, Any]]) -> None:
    """Give an agent back what ``agent_parts`` took.

    Raises:
        UsageError: the checkpoint belongs to another network.
    """
    try:
        agent.load_state(parts)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"resume: the checkpoint is of another network ({reason})") from error


def save(
    run: Path, round_number: int, parts: dict[str, dict[str, Any]], events_bytes: int, keep: int
) -> Path:
    """Write the checkpoint of a round, and remove all but the latest ``keep``."""
    folder = run / "checkpoints"
    folder.mkdir(exist_ok=True)
    target = folder / f"{round_number:06d}"
    draft = folder / f".draft-{round_number:06d}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    sums = {}
    for name, part in parts.items():
        path = draft / f"{name}.pt"
        torch.save(part, path)
        sums[path.name] = _sha256(path)
        sync(path)
    manifest: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "round": round_number,
        "events_bytes": events_bytes,
        "blueprints": BLUEPRINTS,
        "torch": torch.__version__,
        "sha256": sums,
    }
    sealed = manifest | {"manifest_sha256": _digest(manifest)}
    (draft / _MANIFEST).write_text(json.dumps(sealed, indent=2) + "\n")
    sync(draft / _MANIFEST)
    sync(draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    sync(folder)
    for old in _all(run)[:-keep]:
        shutil.rmtree(old)
    return target


def load_latest(run: Path) -> Checkpoint:
    """The latest checkpoint that is whole; a corrupt one is named on stderr and passed over.

    Raises:
        UsageError: the run has none that is whole, or its policy knows other blueprints.
    """
    candidates = _all(run)
    for path in reversed(candidates):
        try:
            checkpoint = _load(path)
        except _UNREADABLE as error:
            print(
                f"checkpoint: {path} is corrupt ({error}); taking the one before", file=sys.stderr
            )
        else:
            _check_blueprints(checkpoint.blueprints)
            return checkpoint
    what = "no checkpoint that is whole" if candidates else "no checkpoint"
    raise UsageError(f"resume: {run} has {what}; start a new run without --resume")


def _all(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))


def _load(path: Path) -> Checkpoint:
    manifest = json.loads((path / _MANIFEST).read_text())
    if manifest.pop("manifest_sha256") != _digest(manifest):
        raise ValueError(f"checksum of {_MANIFEST} does not match")
    if manifest["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema {manifest['schema']}, this version reads {SCHEMA_VERSION}")
    parts: dict[str, dict[str, Tensor]] = {}
    for name, expected in manifest["sha256"].items():
        if _sha256(path / name) != expected:
            raise ValueError(f"checksum of {name} does not match")
        parts[Path(name).stem] = torch.load(path / name, weights_only=True, map_location="cpu")
    return Checkpoint(
        path, manifest["round"], manifest["events_bytes"], manifest["blueprints"], parts
    )


def _check_blueprints(stored: list[str]) -> None:
    if stored == BLUEPRINTS:
        return
    missing = ", ".join(name for name in stored if name not in BLUEPRINTS)
    additional = ", ".join(name for name in BLUEPRINTS if name not in stored)
    differences = [f"{missing} not registered here"] if missing else []
    differences += [f"{additional} unknown to it"] if additional else []
    what = ", ".join(differences) or f"in the order {', '.join(stored)}"
    raise UsageError(
        f"resume: the checkpoint's policy has other blueprints ({what}); "
        "register the same ones in the same order"
    )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sync(path: Path) -> None:
    """Make sure a file or the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
