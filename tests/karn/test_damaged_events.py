"""Readers of runs whose event lines hold anything: one line at most, and the rest is shown."""

import json
import os
import random
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from esper.karn.queries import Store
from esper.karn.report.gather import RunData
from esper.karn.runs import inspect
from esper.karn.sanctum.log import EventLog
from esper.leyline.errors import UsageError

RECORDED = Path(__file__).parents[1] / "recorded" / "healthy"
ODD = (
    *(None, -1, 0, 2**31, 2**63, -(2**63), 10**30, 1e308, "", "x" * 5000, "\x1b[2J"),
    *([], {}, [[]], [1], True, "NaN", 0.5),
)


def mangled(line: bytes, draw: random.Random) -> bytes:
    """A line with one flipped bit, a cut, or one odd value anywhere."""
    if draw.random() < 0.2:
        flipped = bytearray(line)
        flipped[draw.randrange(len(line))] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if draw.random() < 0.1:
        return line[: draw.randrange(len(line))] + b"\n"
    fields: dict[str, Any] = json.loads(line)
    name = draw.choice(list(fields))
    value = fields[name]
    if isinstance(value, list) and value and draw.random() < 0.8:
        change = draw.randrange(3)
        if change == 0:
            value.pop()
        elif change == 1:
            value.append(value[0])
        else:
            value[draw.randrange(len(value))] = draw.choice(ODD)
    elif isinstance(value, dict) and value:
        value[draw.choice(list(value))] = draw.choice(ODD)
    else:
        fields[name] = draw.choice(ODD)
    return json.dumps(fields).encode() + b"\n"


def read(run: Path, query: bool) -> None:
    """Read a run as ``esper runs``, ``report``, ``sanctum`` and ``query`` do."""
    assert inspect(run).path == run
    log = EventLog(run)
    while log.poll() or log.behind:
        pass
    with suppress(UsageError):
        RunData(run)
    if query:
        with Store([run]) as store:
            for view in ("runs", "updates", "steps", "decisions", "seeds", "episodes", "anomalies"):
                store.query(f"SELECT * FROM {view}")


@pytest.mark.parametrize("lines", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mangled_lines_never_end_a_reader(tmp_path: Path, lines: int) -> None:
    run = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    kinds: dict[str, list[bytes]] = {}
    for line in (run / "events.jsonl").read_bytes().splitlines(keepends=True):
        kinds.setdefault(json.loads(line)["event_type"], []).append(line)
    draw, done, rounds = random.Random(3), 0, 0
    while done < lines:
        chosen = [line for each in kinds.values() for line in draw.sample(each, min(4, len(each)))]
        bad = [draw.random() < 0.4 for _ in chosen]
        done, rounds = done + sum(bad), rounds + 1
        texts = (mangled(x, draw) if b else x for x, b in zip(chosen, bad, strict=True))
        (run / "events.jsonl").write_bytes(b"".join(texts))
        read(run, query=rounds % 10 == 0)


def test_a_reader_shows_the_other_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    from esper.scripts import runs as command

    for name in ("one", "two"):
        shutil.copytree(RECORDED, tmp_path / name)

    def inspected(run: Path):
        if run.name == "one":
            raise RecursionError("anything\nodd")
        return inspect(run)

    monkeypatch.setattr(command, "inspect_either", inspected)
    assert command.runs([str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "two" in captured.out
    assert captured.err == (
        f"warning: {tmp_path}/one cannot be read (RecursionError: anything\\nodd)\n"
    )


def test_names_of_a_run_cannot_write_to_the_terminal(tmp_path: Path, capsys) -> None:
    from esper.scripts import runs as command

    run = Path(shutil.copytree(RECORDED, tmp_path / "evil\x1b[2J\nname"))
    first, *rest = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    event = json.loads(first) | {"tasks": ["task\x1b]0;x\x07"], "policy": "p\x9b2J"}
    lines = [json.dumps(event).encode() + b"\n", *rest[: len(rest) // 2]]
    (run / "events.jsonl").write_bytes(b"".join(lines))
    settings = {"settings": {"rounds": 9, "algorithm": "ppo; rm -rf /"}}
    (run / "config.json").write_text(json.dumps(settings))
    assert command.runs([str(tmp_path)]) == 0
    (run / "config.json").write_text(json.dumps({"settings": {"rounds": 9}}))
    assert command.runs([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
    (line,) = (line for line in out.splitlines() if "--resume" in line)
    assert line.startswith("  esper train ppo --resume $'/"), "without the algorithm of a stranger"
    word = line.split("--resume ")[1].split(" --rounds")[0]
    printed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert Path(os.fsdecode(printed.stdout)) == run
