"""Odd input in large numbers: configurations, event lines, manifests, lifecycle sequences."""

import hashlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from esper.leyline.errors import UsageError
from esper.simic.run.checkpoint import load_latest
from torture.common import Part, fresh, quiet, timed, trained

CHUNK = 400
ODD: tuple[Any, ...] = (
    *(None, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, "", "x" * 5000, "\x1b[2J", "../x"),
    *([], {}, [[]], True, "NaN", 0.5, {"a": {"b": []}}, [None] * 99),
)


def configurations(work: Path, count: int = 10_000) -> Part:
    """Fuzzed command lines and settings files: trains or refuses in one line."""
    import fuzzing
    import test_fuzz

    part = Part("fuzzed configurations")
    with timed(part), pytest.MonkeyPatch.context() as monkeypatch:
        place = work / "before"
        place.mkdir(parents=True)
        done = test_fuzz.execute(("train", "ppo", *test_fuzz.SIMPLE, "--telemetry-dir", str(place)))
        if done.code != 0:
            raise AssertionError(done.err)
        (run,) = place.iterdir()
        seed = trained_runs = 0
        while part.tried < count:
            seed += 1
            make = fuzzing.commands if seed % 2 else fuzzing.configs
            cases = make(min(CHUNK, count - part.tried), seed=1000 + seed)
            with tempfile.TemporaryDirectory(dir=work) as folder:
                try:
                    found = test_fuzz.results(cases, Path(folder), run, monkeypatch)
                    trained_runs += sum(outcome.trained for outcome in found)
                except AssertionError as error:
                    part.lost.append(str(error)[:1500])
                monkeypatch.chdir(work)
            part.tried += len(cases)
        part.notes = f"{trained_runs} trained, the others were refused in one line"
    return part


def event_lines(work: Path, count: int = 10_000) -> Part:
    """Mangled event lines: no reader falls over."""
    import test_damaged_events

    part = Part("mangled event lines")
    with timed(part), quiet():
        work.mkdir(parents=True, exist_ok=True)
        test_damaged_events.test_mangled_lines_never_end_a_reader(work, count)
        part.tried = count
    return part


def manifests(work: Path, count: int = 2_000) -> Part:
    """Manifests with odd fields and a valid seal: refused, and an older checkpoint is used."""
    part = Part("odd manifests with valid seals")
    with timed(part):
        run = fresh(trained(work / "base", 2), work / "odd")
        path = run / "checkpoints" / "000002" / "manifest.json"
        original = path.read_bytes()
        draws, used = random.Random(9), 0
        for number in range(count):
            fields = json.loads(original)
            fields.pop("manifest_sha256")
            spoil(fields, draws)
            text = json.dumps(fields, sort_keys=True)
            seal = hashlib.sha256(text.encode()).hexdigest()
            path.write_text(json.dumps(fields | {"manifest_sha256": seal}, indent=2) + "\n")
            try:
                with quiet():
                    used += load_latest(run).round == 2
            except UsageError as error:
                if "\n" in str(error):
                    part.lost.append(f"{number}: {str(error)[:200]}")
            except Exception as error:
                part.lost.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
            part.tried += 1
        part.notes = f"{used} had valid fields all the same"
    return part


def spoil(fields: dict[str, Any], draws: random.Random) -> None:
    """Change one value anywhere, remove a field or add one."""
    place: Any = fields
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = draws.choice(keys)
        inner = isinstance(place[key], dict | list) and place[key] and draws.random() < 0.6
        if not inner:
            break
        place = place[key]
    if draws.random() < 0.2:
        del place[key]
    elif isinstance(place, dict) and draws.random() < 0.2:
        place[draws.choice(("", "x" * 3000, "\n", "policy.pt", "../x.pt"))] = draws.choice(ODD)
    else:
        place[key] = draws.choice(ODD)


def lifecycles(work: Path, count: int = 5_000) -> Part:
    """Random sequences of actions and readings: the lifecycle agrees with its oracle."""
    import test_lifecycle

    part = Part("lifecycle sequences of 20 to 45 steps, compared with an oracle after each change")
    examples = -(-count // test_lifecycle.ENVIRONMENTS)
    with timed(part), patch.object(test_lifecycle, "EXAMPLES", examples):
        test_lifecycle.test_random_action_sequences_agree_with_the_oracle()
        part.tried = examples * test_lifecycle.ENVIRONMENTS
    return part
