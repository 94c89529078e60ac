"""Checkpoints: atomic, checksummed, with a human-readable manifest.

A checkpoint is a directory of ``*.pt`` files and a ``manifest.json``. It is written under a
temporary name, synced, read back and renamed, so a directory with a checkpoint's name is complete.
The checksums detect later damage on the disk.
"""

import errno
import hashlib
import io
import pickletools
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZIP_STORED, ZipFile

import msgspec
import torch

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.config import shown
from esper.leyline.disk import (
    DamagedFile,
    read_regular,
    sealed_json,
    sync,
    unsealed_json,
    write_synced,
)
from esper.leyline.errors import first_line
from esper.leyline.notices import notice
from esper.leyline.run_files import is_round
from esper.simic.ppo import PPOAgent
from esper.simic.run.identity import Identity
from esper.simic.run.unusable_run import UnusableRun
from esper.tamiyo.policy.features import FeatureNames

SCHEMA_VERSION = 4
_MANIFEST = "manifest.json"
_SEAL = "manifest_sha256"
_LARGEST_MANIFEST = 2**24
"""Bytes above which a file is no manifest of Esper's and is not read."""
_MODULES = ("torch", "torch._utils", "collections")
"""Modules that the pickled part of a file may name."""
BEST = "best-"
"""Begin of the name of the checkpoint with the best evaluation."""
_Count = Annotated[int, msgspec.Meta(ge=0)]


class CorruptCheckpoint(ValueError):
    """A checkpoint differs from what was written; the message says in one line how."""


class _Manifest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields of ``manifest.json`` other than its own checksum.

    Attributes:
        schema: version of the checkpoint format.
        round: number of rounds trained.
        events_bytes: length of the event lines at the end of that round.
        blueprints: options of the policy's blueprint head.
        torch: version of torch that wrote the checkpoint.
        sha256: checksums of the other files, by name.
        bytes: sizes of these files.
        identity: what the checkpoint belongs to.
        features: features that the policy observes; None for a policy of a Gymnasium task, and
            for all features of the version that wrote it, which did not name them.
    """

    schema: int
    round: _Count
    events_bytes: _Count
    blueprints: list[str]
    torch: str
    sha256: dict[str, str]
    bytes: dict[str, _Count]
    identity: Identity
    features: FeatureNames | None = None


class Checkpoint(_Manifest, kw_only=True, frozen=True):
    """A checkpoint that was read and verified: its manifest and the rest.

    Attributes:
        path: its directory.
        parts: nested dictionaries of tensors by part name.
    """

    path: Path
    parts: dict[str, dict[str, Any]]


def restore_agent(agent: PPOAgent[Any], parts: dict[str, dict[str, Any]]) -> None:
    """Restore the state of an agent from what ``PPOAgent.state`` returned.

    Raises:
        UnusableRun: the checkpoint belongs to another network.
    """
    try:
        agent.load_state(parts)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise UnusableRun(f"the checkpoint belongs to another network ({reason})") from error


def save(
    run: Path,
    round_number: int,
    parts: dict[str, dict[str, Any]],
    events_bytes: int,
    keep: int,
    identity: Identity,
    features: FeatureNames | None = None,
    best: bool = False,
) -> Path:
    """Write the checkpoint of a round, then remove all but the latest ``keep``.

    ``features`` are those that the policy observes, None for one of a Gymnasium task. With
    ``best`` it takes the place of the best checkpoint instead, which is never resumed.

    Raises:
        OSError: the checkpoint could not be written or does not read back as written; earlier
            checkpoints are unchanged.
    """
    folder = run / "checkpoints"
    if not folder.exists():
        folder.mkdir()
        sync(run)
    _remove(folder.glob(".draft-*"))
    target = folder / f"{BEST if best else ''}{round_number:06d}"
    draft = folder / f".draft-{round_number:06d}"
    try:
        draft.mkdir()
        _write(draft, round_number, parts, events_bytes, identity, features)
        _remove([target])
        draft.rename(target)
    finally:
        _remove([draft])
    sync(folder)
    if best:
        _remove(path for path in folder.glob(f"{BEST}*") if path != target)
    else:
        _prune(run, round_number, keep)
    return target


def best_checkpoint(run: Path) -> Path | None:
    """The folder of the best checkpoint of a run; None if nothing was evaluated."""
    return max((run / "checkpoints").glob(f"{BEST}*"), default=None)


def load_latest(run: Path) -> Checkpoint:
    """Load the latest intact checkpoint; corrupt ones are skipped and named on stderr.

    Raises:
        UnusableRun: the run has no intact checkpoint, another version of Esper wrote it, or its
            policy was trained with other blueprints.
    """
    damage: list[str] = []
    for path in reversed(_checkpoints(run)):
        try:
            checkpoint = load_checkpoint(path)
        except (CorruptCheckpoint, OSError) as error:
            damage.append(f"{path} is corrupt ({getattr(error, 'strerror', None) or error})")
        else:
            for what in damage:
                notice(f"checkpoint: {what}; using that of round {path.name}")
            _check_blueprints(checkpoint.blueprints)
            _check_features(checkpoint.features)
            return checkpoint
    what = f"no intact checkpoint: {damage[0]}" if damage else "no checkpoint"
    raise UnusableRun(f"{run} has {what}", "start a new run without --resume")


def what_stays(run: Path) -> str:
    """What is left in a run whose checkpoint could not be written, in words."""
    return "earlier checkpoints stay" if _checkpoints(run) else "there is no earlier one"


def latest_identity(run: Path) -> Identity | None:
    """The identity in the latest checkpoint whose manifest is intact; None without one.

    Raises:
        UnusableRun: another version of Esper wrote it.
    """
    manifest = _latest_manifest(run)
    return None if manifest is None else manifest.identity


def latest_round(run: Path) -> int:
    """The round of the latest checkpoint whose manifest is intact; 0 without one.

    Raises:
        UnusableRun: another version of Esper wrote it.
    """
    manifest = _latest_manifest(run)
    return 0 if manifest is None else manifest.round


def latest_features(run: Path) -> FeatureNames | None:
    """Features that the policy of the latest intact manifest observes; None as in ``_Manifest``.

    Raises:
        UnusableRun: another version of Esper wrote it.
    """
    manifest = _latest_manifest(run)
    features = None if manifest is None else manifest.features
    _check_features(features)
    return features


def _latest_manifest(run: Path) -> _Manifest | None:
    for path in reversed(_checkpoints(run)):
        with suppress(CorruptCheckpoint, OSError):
            return _read_manifest(path / _MANIFEST)
    return None


def _checkpoints(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if is_round(p.name)), key=lambda p: int(p.name))


def _write(
    folder: Path,
    round_number: int,
    parts: dict[str, dict[str, Any]],
    events_bytes: int,
    identity: Identity,
    features: FeatureNames | None,
) -> None:
    """Write the files of a checkpoint and read them back."""
    sums, sizes = {}, {}
    for name, part in parts.items():
        # Hash the bytes in memory: a checksum of the written file would include a write error.
        content = io.BytesIO()
        torch.save(part, content)
        write_synced(folder / f"{name}.pt", content.getvalue())
        sums[f"{name}.pt"] = _sha256(content.getvalue())
        sizes[f"{name}.pt"] = len(content.getvalue())
    manifest = _Manifest(
        schema=SCHEMA_VERSION,
        round=round_number,
        events_bytes=events_bytes,
        blueprints=BLUEPRINTS,
        torch=str(torch.__version__),
        sha256=sums,
        bytes=sizes,
        identity=identity,
        features=features,
    )
    write_synced(folder / _MANIFEST, sealed_json(msgspec.to_builtins(manifest), _SEAL))
    sync(folder)
    try:
        _contents(folder)
    except CorruptCheckpoint as error:
        raise OSError(errno.EIO, f"the checkpoint cannot be read back: {error}") from error


def _prune(run: Path, newest: int, keep: int) -> None:
    """Remove checkpoints older than the latest ``keep``, and those of later rounds.

    Checkpoints of rounds after ``newest`` are corrupt: they were skipped when the run was resumed.
    If they counted among the latest, intact ones would be removed in their place.
    """
    folders = _checkpoints(run)
    done = [path for path in folders if int(path.name) <= newest]
    _remove(path for path in folders if path not in done[-keep:])


def _remove(paths: Iterable[Path]) -> None:
    """Remove directories; one that cannot be removed is retried after the next checkpoint."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path) -> Checkpoint:
    """Load the checkpoint in the directory ``path``.

    Raises:
        CorruptCheckpoint: it differs from what was written.
        OSError: a file is missing or cannot be read.
        UnusableRun: another version of Esper wrote it.
    """
    manifest, files = _contents(path)
    if manifest.round != int(path.name.removeprefix(BEST)):
        raise CorruptCheckpoint(f"its manifest is that of round {manifest.round}")
    parts = {Path(name).stem: _tensors(name, content) for name, content in files.items()}
    fields = {name: getattr(manifest, name) for name in _Manifest.__struct_fields__}
    return Checkpoint(path=path, parts=parts, **fields)


def _contents(path: Path) -> tuple[_Manifest, dict[str, bytes]]:
    """The manifest and the content of the files it names, with their checksums verified.

    Raises:
        CorruptCheckpoint: something differs from what was written.
        OSError: a file is missing or cannot be read.
        UnusableRun: another version of Esper wrote it.
    """
    manifest = _read_manifest(path / _MANIFEST)
    files = {}
    for name, checksum in manifest.sha256.items():
        if not (name.endswith(".pt") and name.removesuffix(".pt").isidentifier()):
            raise CorruptCheckpoint(
                f"{_MANIFEST} names {shown(name)}, which is not the file of a part"
            )
        files[name] = read_regular(path / name, manifest.bytes.get(name, 0))
        if _sha256(files[name]) != checksum:
            raise CorruptCheckpoint(f"checksum of {name} does not match")
    return manifest, files


def _read_manifest(path: Path) -> _Manifest:
    content = read_regular(path, _LARGEST_MANIFEST)
    try:
        fields = unsealed_json(content, _SEAL)
    except DamagedFile as error:
        if error.__cause__ is not None:
            raise CorruptCheckpoint(f"{_MANIFEST} is not a valid manifest") from error
        raise CorruptCheckpoint(f"checksum of {_MANIFEST} does not match") from error
    if fields.get("schema") != SCHEMA_VERSION:
        raise UnusableRun(
            f"{path.parent} has schema {shown(fields.get('schema'))}; this version reads "
            f"{SCHEMA_VERSION}",
            "resume with the version that wrote it",
        )
    try:
        return msgspec.convert(fields, _Manifest)
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(f"{_MANIFEST}: {shown(str(error))}") from error


def _tensors(name: str, content: bytes) -> dict[str, Any]:
    """The dictionary of tensors in a file; nothing in it is executed."""
    try:
        _check_archive(content)
        part = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:
        # Which errors a crafted file raises is undocumented, and torch's message advises the user
        # to load the file without weights_only, which would execute it.
        raise CorruptCheckpoint(f"{name} contains something other than tensors") from error
    if not isinstance(part, dict):
        raise CorruptCheckpoint(f"{name} does not contain a dictionary")
    return part


def _check_archive(content: bytes) -> None:
    """Refuse an archive that would take more memory than its own size.

    Raises:
        ValueError: a part is compressed, or the pickle names a function that allocates.
    """
    with ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != ZIP_STORED for entry in entries):
            raise ValueError("a part is compressed")
        if sum(entry.file_size for entry in entries) > len(content):
            raise ValueError("parts overlap")
        (payload,) = (entry for entry in entries if entry.filename.endswith("/data.pkl"))
        for opcode, argument, _ in pickletools.genops(archive.read(payload)):
            # Torch writes protocol 2, in which a name is one argument of the opcode GLOBAL.
            is_name = opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST")
            if is_name and str(argument).partition(" ")[0] not in _MODULES:
                raise ValueError(f"it names {argument}")


def _check_blueprints(names: list[str]) -> None:
    if names == BLUEPRINTS:
        return
    missing = ", ".join(name for name in names if name not in BLUEPRINTS)
    additional = ", ".join(name for name in BLUEPRINTS if name not in names)
    differences = [f"{missing} not registered here"] if missing else []
    differences += [f"{additional} not in the checkpoint"] if additional else []
    what = ", ".join(differences) or f"in the order {', '.join(names)}"
    raise UnusableRun(
        f"the checkpoint's policy has other blueprints ({what}); "
        "register the same ones in the same order"
    )


def _check_features(features: FeatureNames | None) -> None:
    unknown = features.unknown() if features is not None else []
    if unknown:
        raise UnusableRun(
            f"the checkpoint's policy observes {', '.join(unknown)}, which this version does not "
            "compute; use the version of Esper that it came with"
        )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
