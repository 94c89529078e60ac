"""Plugins: run once, with errors reported in one line."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from esper.kasmina.blueprints import BUILDERS
from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS
from esper.leyline.errors import UsageError
from esper.runtime import data, plugins
from esper.runtime.gate import Permission
from esper.runtime.tasks import SUITES, TASKS, find

pytestmark = pytest.mark.usefixtures("scratch_register")

PLUGIN = """
from dataclasses import dataclass

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime import data
from esper.runtime.tasks import Task, task


@dataclass
class Note:
    text: str


@task
def NAME() -> Task:
    host = CnnHost(channels=(4, 4), classes=10, image=(8, 8, 1))
    return Task("NAME", "mine", host, data.digits)
"""


def load(path: str) -> None:
    """Run the file as one that the command line names."""
    plugins.load(path, Permission((path,)))


def plugin(folder: Path, source: str, name: str = "mine") -> Path:
    path = folder / "own tasks.py"
    path.write_text(source.replace("NAME", name))
    return path


def test_plugin_registers_its_tasks_and_leaves_no_files(tmp_path: Path):
    load(str(plugin(tmp_path, PLUGIN)))
    assert find("mine").host.channels == (4, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["own tasks.py"]


def test_plugin_is_run_once_however_its_path_is_spelt(tmp_path: Path, monkeypatch):
    path = plugin(tmp_path, PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link.py").symlink_to(path)
    load(str(path))
    factory = TASKS["mine"]
    for spelling in (path.name, f"./{path.name}", f"~/{path.name}", "link.py", str(path)):
        load(spelling)
    assert TASKS["mine"] is factory


def test_two_plugins_of_one_file_name_do_not_collide(tmp_path: Path):
    modules = set(sys.modules)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        load(str(plugin(tmp_path / name, PLUGIN, name)))
    assert find("first").name == "first"
    assert find("second").name == "second"
    new = [sys.modules[name] for name in sys.modules.keys() - modules]
    assert len(new) == 2
    for module in new:
        note = module.Note("kept")
        assert pickle.loads(pickle.dumps(note)) == note


MISTAKES = [
    ("x = 1\n\nraise RuntimeError('no\\nluck')\n", ", line 3: RuntimeError: no luck"),
    ("import nosuchmodule\n", ", line 1: ModuleNotFoundError: No module named 'nosuchmodule'"),
    ("x = 1\ndef f(:\n", ", line 2: SyntaxError: invalid syntax"),
    ("def f():\n    return 1 / 0\n\nf()\n", ", line 2: ZeroDivisionError: division by zero"),
    ("import sys\nsys.exit(3)\n", ", line 2: SystemExit: 3"),
    ("import json\n\njson.loads('{')\n", ", line 3: JSONDecodeError: Expecting property name"),
    (PLUGIN.replace("4, 4", "4, 0"), ", line 16: ValueError: channels needs one or more numbers"),
    (PLUGIN.replace("NAME()", "yours()"), "task: the factory 'yours' makes a task called 'mine'"),
    ("x = '\0'\n", "SyntaxError"),
]


@pytest.mark.parametrize(("source", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_error_in_a_plugin_is_one_line_with_its_location(tmp_path: Path, source: str, says: str):
    path = plugin(tmp_path, source)
    modules = set(sys.modules)
    with pytest.raises(UsageError) as error:
        load(str(path))
    message = str(error.value)
    assert message.startswith(f"plugin: {path}")
    assert says in message
    assert "\n" not in message
    assert not [name for name in sys.modules.keys() - modules if "esper_plugin" in name]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere.py", "cannot read 'nowhere.py' (No such file or directory)"),
        ("notes.txt", "notes.txt is not a Python file"),
        ("folder.py", "cannot read 'folder.py' (Is a directory)"),
        ("", "not a Python file"),
        ("\0.py", "cannot read"),
    ],
)
def test_path_that_is_not_a_python_file_is_refused(
    tmp_path: Path, monkeypatch, path: str, says: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(PLUGIN)
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UsageError) as error:
        load(path)
    assert str(error.value).startswith("plugin: ")
    assert says in str(error.value)


def test_taken_name_error_names_the_second_plugin(tmp_path: Path):
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    for path in (first, second):
        path.write_text(PLUGIN.replace("NAME", "mine"))
    load(str(first))
    with pytest.raises(UsageError, match=r"second\.py, line 14: task: 'mine' is already"):
        load(str(second))


def test_failed_plugin_can_be_fixed_and_loaded(tmp_path: Path):
    path = plugin(tmp_path, PLUGIN + "\noops\n")
    with pytest.raises(UsageError, match="NameError"):
        load(str(path))
    assert "mine" not in TASKS
    load(str(plugin(tmp_path, PLUGIN)))
    assert "mine" in TASKS


def test_failed_plugin_leaves_nothing_registered(tmp_path: Path) -> None:
    before = list(BLUEPRINTS), dict(BUILDERS), dict(HEAD_WIDTHS), dict(TASKS), dict(SUITES)
    path = tmp_path / "half.py"
    path.write_text(
        "from esper.kasmina.blueprints import register\n"
        "from esper.kasmina.blueprints.conv import norm\n"
        "from esper.runtime.tasks import SUITES\n"
        "register('half_done', norm)\n"
        "SUITES['half'] = ('digits',)\n"
        "raise OSError('enough')\n"
    )
    for _ in range(2):  # a name left registered would be refused the second time
        with pytest.raises(UsageError, match="line 6: OSError: enough"):
            load(str(path))
    assert (list(BLUEPRINTS), BUILDERS, HEAD_WIDTHS, TASKS, SUITES) == before


@pytest.mark.parametrize("error", ["KeyError('x')", "OSError('x')", "RuntimeError('x')"])
def test_error_in_making_data_names_the_task(error: str) -> None:
    def broken() -> data.Dataset:
        raise eval(error)

    mine = replace(find("digits"), data=broken)
    with pytest.raises(
        UsageError, match=f"data: the task 'digits' cannot make its data set .{error[:7]}"
    ):
        mine.datasets()
