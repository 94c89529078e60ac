"""Checkpoints: atomic, checksummed, and readable by eye in their manifest.

A checkpoint is a directory of ``*.pt`` files and a ``manifest.json``. It is written under another
name, synced, read back and renamed, so a directory with the right name is whole; the checksums find
what the disk did to it afterwards.
"""

import errno
import hashlib
import io
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.config import shown
from esper.leyline.errors import UsageError
from esper.simic.ppo import PPOAgent
from esper.simic.run.disk import sync, write_synced

SCHEMA_VERSION = 2
_MANIFEST = "manifest.json"
_SEAL = "manifest_sha256"
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Damaged(ValueError):
    """A checkpoint is not what was written; the text says in one line what differs."""


class _Manifest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What ``manifest.json`` holds besides its own checksum.

    Attributes:
        schema: version of all this.
        round: rounds that were done.
        events_bytes: length of the event file at that time.
        blueprints: options of the policy's blueprint head.
        torch: version that wrote it.
        sha256: of the other files, by name.
    """

    schema: int
    round: _Count
    events_bytes: _Count
    blueprints: list[str]
    torch: str
    sha256: dict[str, str]


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
    """Write the checkpoint of a round, and remove all but the latest ``keep``.

    Nothing is removed before the new one stands.

    Raises:
        OSError: it could not be written, or does not read back as it was written; the checkpoints
            before are as they were.
    """
    folder = run / "checkpoints"
    if not folder.exists():
        folder.mkdir()
        sync(run)
    _remove(folder.glob(".draft-*"))
    target = folder / f"{round_number:06d}"
    draft = folder / f".draft-{round_number:06d}"
    try:
        draft.mkdir()
        _write(draft, round_number, parts, events_bytes)
        _remove([target])
        draft.rename(target)
    finally:
        _remove([draft])
    sync(folder)
    _prune(run, round_number, keep)
    return target


def load_latest(run: Path) -> Checkpoint:
    """The latest checkpoint that is whole; corrupt ones are named on stderr and passed over.

    Raises:
        UsageError: the run has none that is whole, or it is of another version of Esper, or its
            policy knows other blueprints.
    """
    damaged: list[str] = []
    for path in reversed(_all(run)):
        try:
            checkpoint = load_checkpoint(path)
        except (Damaged, OSError) as error:
            damaged.append(f"{path} is corrupt ({getattr(error, 'strerror', None) or error})")
        else:
            for what in damaged:
                print(f"checkpoint: {what}; taking that of round {path.name}", file=sys.stderr)
            _check_blueprints(checkpoint.blueprints)
            return checkpoint
    what = f"no checkpoint that is whole: {damaged[0]}" if damaged else "no checkpoint"
    raise UsageError(f"resume: {run} has {what}; start a new run without --resume")


def _all(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))


def _write(
    folder: Path, round_number: int, parts: dict[str, dict[str, Any]], events_bytes: int
) -> None:
    """Write the files of a checkpoint and read them back."""
    sums = {}
    for name, part in parts.items():
        # Hashed before the disk had it: afterwards a checksum would vouch for what went wrong.
        content = io.BytesIO()
        torch.save(part, content)
        write_synced(folder / f"{name}.pt", content.getvalue())
        sums[f"{name}.pt"] = _sha256(content.getvalue())
    manifest = _Manifest(
        schema=SCHEMA_VERSION,
        round=round_number,
        events_bytes=events_bytes,
        blueprints=BLUEPRINTS,
        torch=str(torch.__version__),
        sha256=sums,
    )
    write_synced(folder / _MANIFEST, _sealed(msgspec.to_builtins(manifest)))
    sync(folder)
    try:
        _verified(folder)
    except Damaged as error:
        raise OSError(errno.EIO, f"what was written cannot be read back: {error}") from error


def _prune(run: Path, newest: int, keep: int) -> None:
    """Remove what is older than the latest ``keep``, and what lies ahead.

    Checkpoints of later rounds were passed over when the run was resumed, for they are corrupt;
    counted among the latest they would drive out those that are whole.
    """
    known = _all(run)
    done = [path for path in known if int(path.name) <= newest]
    _remove(path for path in known if path not in done[-keep:])


def _remove(paths: Iterable[Path]) -> None:
    """Remove directories; what cannot be removed is tried again with the next checkpoint."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the directory ``path``.

    Raises:
        Damaged: it is not what was written.
        OSError: a file is missing or cannot be read.
        UsageError: another version of Esper wrote it.
    """
    manifest, files = _verified(path)
    if manifest.round != int(path.name):
        raise Damaged(f"it is of round {manifest.round}")
    parts = {Path(name).stem: _tensors(name, content) for name, content in files.items()}
    return Checkpoint(path, manifest.round, manifest.events_bytes, manifest.blueprints, parts)


def _verified(path: Path) -> tuple[_Manifest, dict[str, bytes]]:
    """The manifest, and the content of the files it names, all as they were written.

    Raises:
        Damaged: something is not.
        OSError: a file is missing or cannot be read.
        UsageError: another version of Esper wrote it.
    """
    manifest = _read_manifest(path / _MANIFEST)
    files = {}
    for name, expected in manifest.sha256.items():
        if not (name.endswith(".pt") and name.removesuffix(".pt").isidentifier()):
            raise Damaged(f"{_MANIFEST} names the file {shown(name)}, which is no part")
        files[name] = (path / name).read_bytes()
        if _sha256(files[name]) != expected:
            raise Damaged(f"checksum of {name} does not match")
    return manifest, files


def _read_manifest(path: Path) -> _Manifest:
    content = path.read_bytes()
    try:
        fields = json.loads(content)
        del fields[_SEAL]
        # To the byte: a checksum of the fields alone would not see that an end is missing.
        whole = _sealed(fields) == content
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{_MANIFEST} is no manifest") from error
    if not whole:
        raise Damaged(f"checksum of {_MANIFEST} does not match")
    if fields.get("schema") != SCHEMA_VERSION:
        raise UsageError(
            f"resume: {path.parent} has schema {shown(fields.get('schema'))}, this version reads "
            f"{SCHEMA_VERSION}; resume with the version that wrote it"
        )
    try:
        return msgspec.convert(fields, _Manifest)
    except msgspec.ValidationError as error:
        raise Damaged(f"{_MANIFEST}: {shown(str(error))}") from error


def _tensors(name: str, content: bytes) -> dict[str, Any]:
    """The dictionary of tensors in a file; nothing in it is executed."""
    try:
        part = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:
        # What a crafted file makes torch raise stands nowhere; its text invites to execute it.
        raise Damaged(f"{name} holds something else than tensors") from error
    if not isinstance(part, dict):
        raise Damaged(f"{name} holds no dictionary")
    return part


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


def _sealed(fields: dict[str, Any]) -> bytes:
    """The text of a manifest, its own checksum included."""
    seal = _sha256(json.dumps(fields, sort_keys=True).encode())
    return (json.dumps(fields | {_SEAL: seal}, indent=2) + "\n").encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
