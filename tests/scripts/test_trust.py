"""Code that only a run directory names is not executed on resuming without a word of the user."""

import json
import os
from pathlib import Path

import pytest

from esper.karn.runs import inspect
from esper.scripts.main import esper
from processes import called, refusal
from small_runs import SMALL


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """A run whose settings name a plugin, and the file that the plugin writes."""
    trace, plugin = tmp_path / "executed", tmp_path / "evil.py"
    plugin.write_text(f"open({str(trace)!r}, 'w')")
    run = tmp_path / "run"
    run.mkdir()
    settings = {**SMALL, "plugin": [str(plugin)], "rounds": 2}
    content = {"id": "x", "settings": settings, "fingerprint": {}}
    (run / "config.json").write_text(json.dumps(content))
    return run, trace


def test_a_stored_plugin_is_executed_only_if_it_is_named_or_trusted(
    planted, tmp_path: Path, capsys
) -> None:
    run, trace = planted
    before = sorted(run.iterdir())
    line = refusal(capsys, esper, "train", "ppo", "--resume", str(run))
    assert line.startswith(f"esper: plugin: {run} names ")
    assert "evil.py', which is not executed because data name it" in line
    assert "give --plugin FILE, or --trust" in line
    assert not trace.exists()
    assert sorted(run.iterdir()) == before
    # The run has no checkpoint, which is found out after its plugin was executed.
    trusted = called(["train", "ppo", "--resume", str(run), "--trust"], tmp_path)
    assert "no checkpoint" in trusted.stderr
    assert trace.exists()


def test_trust_belongs_to_resume(capsys) -> None:
    error = refusal(capsys, esper, "train", "ppo", "--trust")
    assert error.startswith("esper: trust: belongs to --config-json and --resume")


def test_the_module_of_a_stored_gymnasium_id_is_not_imported(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    content = {"settings": {"gym": "evil:Thing-v0"}, "fingerprint": {}}
    (run / "config.json").write_text(json.dumps(content))
    error = refusal(capsys, esper, "train", "ppo", "--resume", str(run))
    assert error.startswith(
        f"esper: gym: {run} names 'evil:Thing-v0', whose module is not imported"
    )
    assert "give --gym ID, or --trust" in error
    for flags in (("--gym", "evil:Thing-v0"), ("--trust",)):
        error = refusal(capsys, esper, "train", "ppo", "--resume", str(run), *flags)
        assert error.startswith("esper: gym: evil:Thing-v0 cannot be created (No module named")


def test_the_command_that_resumes_names_the_plugins(planted) -> None:
    run, _ = planted
    folder = run / "checkpoints" / "000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (run / "events.jsonl").write_text(
        '{"event_type":"TRAINING_FINISHED","time":1.0,"round":1,'
        '"status":"interrupted","message":null}\n'
    )
    command = inspect(run).resume
    assert command == (
        f"esper train ppo --resume {run} --rounds 2 --plugin {os.path.dirname(run)}/evil.py"
    )
