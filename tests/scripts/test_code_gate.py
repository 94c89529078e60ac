"""Nothing runs but what the command line names, whatever is given to which flag."""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esper.karn.runs import inspect
from esper.leyline.errors import UsageError
from esper.runtime.gate import NOTHING, Permission
from esper.scripts.main import esper
from esper.scripts.train import flags_of_commands
from processes import ROOT, called, ran_python, refusal
from small_runs import SMALL

AUDIT = ROOT / "tests" / "scripts" / "code_audit.py"
SOURCE = ROOT / "src"
COMMANDS = {
    *("scripts/grow_model.py", "scripts/grow_task.py", "scripts/tasks.py", "scripts/train.py"),
    "scripts/play.py",
    "esper_lab/evaluate.py",
}
PYTHON_INTERFACE = {"simic/tools/gym_policy.py", "simic/training/vectorized.py"}
ACTORS = {"simic/training/actor_specs.py"}
"""They execute what the learner was permitted to."""
EXECUTING = {
    "runtime/plugins.py": {"exec", "import_module"},  # behind the gate
    "scripts/grown_files.py": {"exec"},  # text of this very process
    # Names that no data can choose.
    "__init__.py": {"import_module"},
    "esper_growth.py": {"import_module"},
    "leyline/config/__init__.py": {"import_module"},
    "leyline/config/algorithm.py": {"import_module"},
    "own_models/__init__.py": {"import_module"},
    "own_models/lifecycle_controller.py": {"resolve_name"},
    "scripts/completion.py": {"import_module"},
    "scripts/main.py": {"import_module"},
    "simic/distributed/cluster.py": {"import_module"},
}
"""What can execute code, by the file that calls it."""


def report(folder: Path, cases: str, before: str = "pass") -> dict[str, Any]:
    """What the audit found, in a process of its own."""
    (folder / "work").mkdir()
    code = f"import sys, runpy; {before}; runpy.run_path({str(AUDIT)!r}, run_name='__main__')"
    paths = f"{SOURCE}:{ROOT / 'tests'}"
    done = ran_python(code, str(folder / "work"), cases, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], refused: set[str]) -> None:
    """Nothing ran, each refusal names what to give, and each case would have run without it."""
    assert found["executed"] == []
    assert found["refused_although_named"] == []
    assert found["unseen"] == []
    assert refused <= set(found["refused"])
    assert {line.split(": ")[1] for line in found["lines"]} <= {"plugin", "gym"}
    classes = [
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Arguments")
    ]
    # Those of ``esper train`` are made of the settings of each algorithm and control.
    assert len(found["commands"]) == len(classes) + len(flags_of_commands())


def test_no_command_executes_what_data_name(tmp_path: Path) -> None:
    found = report(tmp_path, "7")
    assert found["tried"] > 150
    readers = {"train imitation records", "train offline records"}
    check(found, readers | {"evaluate policy", "grow policy"})


@pytest.mark.slow
def test_no_command_executes_any_of_it(tmp_path: Path) -> None:
    found = report(tmp_path, "all")
    assert found["tried"] > 3000
    resumed = {"train ppo resume", "train imitation resume", "evaluate policy", "grow policy"}
    files = {f"train {name} config_json" for name in ("ppo", "impala", "rule", "random")}
    # The directory of several seeds is among the settings of the last.
    check(found, resumed | files | {"train offline records", "train ppo data_dir"})
    assert any("runs/pair/seed-42 names" in line for line in found["lines"])
    assert any(line.startswith("esper: gym: gym.json names") for line in found["lines"])


@pytest.mark.slow
def test_a_reader_that_loads_plugins_by_itself_is_noticed(tmp_path: Path) -> None:
    """As ``train imitation --records`` did, before there was a gate."""
    before = (
        "from esper.simic.offline import recorded_data as r; from esper.runtime import gate; "
        "load = r.plugins.load_all; r.plugins = type(sys)('plugins'); "
        "r.plugins.load_all = lambda c, p, s: load(c, gate.Permission(trust=True), s); "
        "r.plugins.file_of = lambda path: path"
    )
    found = report(tmp_path, "7", before)
    assert any(line.startswith("train imitation") for line in found["executed"])


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Every call in the source by the name of its file below the package, and its function."""
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE)).removeprefix("esper/")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield name, node, ast.unparse(node.func)


def test_only_commands_and_the_python_interface_give_permission() -> None:
    makers = {
        file
        for file, call, function in calls()
        if function.endswith("Permission") and (call.args or call.keywords)
    }
    assert makers == COMMANDS | PYTHON_INTERFACE | ACTORS


def test_code_is_executed_in_known_places_alone() -> None:
    names = {"exec", "eval", "__import__", "import_module", "resolve_name", "run_path"}
    names |= {"spec_from_file_location", "exec_module", "run_module"}
    found: dict[str, set[str]] = {}
    for file, call, function in calls():
        name = function.rpartition(".")[2]
        if name in names and not (name == "eval" and "." in function):  # model.eval()
            found.setdefault(file, set()).add(name)
        if function == "torch.load":
            assert "weights_only=True" in ast.unparse(call), file
        assert function not in ("pickle.load", "pickle.loads"), file
        assert "allow_pickle" not in ast.unparse(call), file
    assert found == EXECUTING


def test_a_file_is_permitted_by_its_path_or_by_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.py"
    own.write_text("")
    (tmp_path / "link.py").symlink_to(own)
    named = Permission(("link.py",))
    assert named.file(str(own), "runs/a") == "link.py"
    assert named.file("/home/somebody/link.py", "runs/a") == "link.py"
    assert named.file("\0/link.py", "runs/a") == "link.py"
    assert Permission(("first/own.py", "own.py")).file(str(own), "runs/a") == "own.py"
    assert Permission(trust=True).file("other.py", "runs/a") == "other.py"
    for permission in (NOTHING, named):
        with pytest.raises(UsageError, match=r"^plugin: runs/a names 'other\.py', which is not"):
            permission.file("other.py", "runs/a")


def test_a_module_is_permitted_by_its_id_alone() -> None:
    for permission in (Permission(gym="own:Id-v0"), Permission(trust=True)):
        permission.check((), "own:Id-v0", "runs/a")
    NOTHING.check((), "CartPole-v1", "runs/a")
    for permission in (NOTHING, Permission(gym="own:Other-v0")):
        with pytest.raises(UsageError, match=r"^gym: runs/a names 'own:Id-v0', whose module is"):
            permission.check((), "own:Id-v0", "runs/a")


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
