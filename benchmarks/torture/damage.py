"""Flipped bits, cut and exchanged files, hostile pickles: found, or without consequence."""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from esper.karn.queries import Store
from esper.karn.report.gather import RunData
from esper.karn.runs import inspect
from esper.karn.sanctum.log import EventLog
from esper.leyline.errors import UsageError
from esper.native import library
from esper.native.build import digest_path, is_intact
from esper.simic.run.checkpoint import load_latest
from torture.common import Part, differs, fresh, quiet, resumed, timed, trained

FLIPS, CUTS, SWAPS = 300, 100, 40
KINDS = ("checkpoint", "manifest", "config", "events", "cache")


def damage(work: Path) -> Part:
    """Damage files of a run in every way, and resume it and read it."""
    part = Part(f"{FLIPS} flips, {CUTS} cuts and {SWAPS} exchanges of {', '.join(KINDS)}")
    outcomes: Counter[str] = Counter()
    with timed(part):
        base, reference = _runs(work)
        other = trained(work / "other", 3, seed=6, events_megabytes=1)
        draws = random.Random(7)
        ways = ["flip"] * FLIPS + ["cut"] * CUTS + ["exchange"] * SWAPS
        for number, way in enumerate(ways):
            kind = KINDS[number % len(KINDS)]
            if kind == "cache":
                outcomes["noticed"] += _cache(work, way, draws, part)
            else:
                run = fresh(base, work / "damaged")
                _harm(run, kind, way, draws, other)
                outcomes[_verdict(run, reference, f"{way} of {kind}", part)] += 1
            part.tried += 1
        part.notes = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    return part


def _runs(work: Path) -> tuple[Path, Path]:
    base = trained(work / "base", 3)
    reference = fresh(base, work / "reference")
    resumed(reference, 4)
    return base, reference


def _target(run: Path, kind: str, draws: random.Random) -> Path:
    if kind == "checkpoint":
        return draws.choice(sorted((run / "checkpoints" / "000003").glob("*.pt")))
    names = {
        "manifest": "checkpoints/000003/manifest.json",
        "config": "config.json",
        "events": "events.jsonl",
    }
    return run / names[kind]


def _harm(run: Path, kind: str, way: str, draws: random.Random, other: Path) -> None:
    path = _target(run, kind, draws)
    if way == "exchange":
        others = [other / path.relative_to(run)]
        if kind in ("checkpoint", "manifest"):
            others.append(run / "checkpoints" / "000002" / path.name)
        shutil.copy(draws.choice(others), path)
        return
    content = bytearray(path.read_bytes())
    place = draws.randrange(len(content))
    if way == "flip":
        content[place] ^= 1 << draws.randrange(8)
    else:
        del content[place:]
    path.write_bytes(content)


def _verdict(run: Path, reference: Path, what: str, part: Part) -> str:
    """Whether a damaged run is refused, or ends in the same bits."""
    try:
        _read(run)
    except Exception as error:
        part.lost.append(f"{what}: a reader: {type(error).__name__}: {error}")
    try:
        with quiet() as told:
            resumed(run, 4)
    except UsageError as error:
        if "\n" in str(error):
            part.lost.append(f"{what}: {str(error)[:200]}")
        return "refused in one line"
    except Exception as error:
        part.lost.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        return "lost"
    found = differs(run, reference)
    if found:
        part.lost.append(f"{what}: {found} {told.getvalue()[:200]}")
        return "lost"
    return "ended in the same bits"


def _read(run: Path) -> None:
    with quiet():
        inspect(run)
        log = EventLog(run)
        while log.poll() or log.behind:
            pass
        try:
            RunData(run)
            with Store([run]) as store:
                store.query("SELECT count(*) FROM steps")
        except UsageError:
            return


def _cache(work: Path, way: str, draws: random.Random, part: Part) -> int:
    """Damage a copy of the compiled library or of its digest."""
    folder = work / "cache"
    folder.mkdir(exist_ok=True)
    path = folder / "library.so"
    path.write_bytes(Path(library.library()._name).read_bytes())
    path.chmod(0o755)
    own = digest_path(path)
    own.write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    own.chmod(0o755)
    if not is_intact(path):
        raise AssertionError("an intact library is refused")
    target = draws.choice((path, own))
    content = bytearray(target.read_bytes())
    if way == "exchange":
        content = bytearray(b"\x7fELF" + os.urandom(64))
    elif way == "flip":
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    else:
        del content[draws.randrange(len(content)) :]
    target.write_bytes(content)
    if is_intact(path):
        part.lost.append(f"{way} of the cache was not noticed")
        return 0
    return 1


# --- hostile pickles --------------------------------------------------------------------------


class _Calls:
    """Pickled, it is a call of a function."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def pickles(work: Path) -> Part:
    """Hostile content in a checkpoint whose checksums are right; nothing of it is executed."""
    part = Part("hostile pickles")
    with timed(part):
        base = trained(work / "base", 2)
        target = work / "executed"
        for number, content in enumerate(_hostile(work, target)):
            run = fresh(base, work / "hostile")
            folder = run / "checkpoints" / "000002"
            (folder / "policy.pt").write_bytes(content)
            _forge(folder / "manifest.json", content)
            with quiet() as told:
                found = load_latest(run).round
            if found != 1 or target.exists() or told.getvalue().count("\n") != 1:
                part.lost.append(f"pickle {number}: round {found}, {told.getvalue()[:200]}")
            part.tried += 1
    return part


def _forge(path: Path, content: bytes) -> None:
    fields = json.loads(path.read_text())
    fields.pop("manifest_sha256")
    fields["sha256"]["policy.pt"] = hashlib.sha256(content).hexdigest()
    fields["bytes"]["policy.pt"] = len(content)
    seal = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(fields | {"manifest_sha256": seal}, indent=2) + "\n")


def _hostile(work: Path, target: Path) -> list[bytes]:
    """Twenty files that would create ``target``, allocate without end, or are no tensors."""
    made = [
        *(_Calls(os.mkdir, str(target)), _Calls(os.system, f"mkdir {target}")),
        *(_Calls(eval, f"__import__('os').mkdir({str(target)!r})"), _Calls(open, str(target), "w")),
        _Calls(exec, f"open({str(target)!r}, 'w')"),
        *(_Calls(bytearray, 1 << 40), _Calls(os.makedirs, str(target))),
        _Calls(torch.zeros, 1 << 40),
        _Calls(torch.load, str(target)),
        _Calls(Path.mkdir, target),
    ]
    files = []
    for legacy in (False, True):
        for value in made[: 10 if not legacy else 5]:
            path = work / "made.pt"
            torch.save({"w": value}, path, _use_new_zipfile_serialization=not legacy)
            files.append(path.read_bytes())
    files += [pickle.dumps({"w": made[0]}), pickle.dumps(made[0], 5), b"\x80\x02c__main__\nx\n."]
    path = work / "bomb.pt"
    with ZipFile(path, "w", 8) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/data/0", b"\0" * (64 << 20))
    files += [path.read_bytes(), path.read_bytes()[:100]]
    return files
