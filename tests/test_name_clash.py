"""The package named esper on PyPI, an entity component system, has the same import name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import ran

SOURCE = Path(__file__).parents[1] / "src"
COMMAND = "import esper_growth; esper_growth.main()"


def namesake(
    site: Path, init: str | None = "__version__ = '3.9'\ndef create_entity(): ...\n"
) -> None:
    """Install the other package into ``site``, with ``init`` as its only module."""
    (site / "esper").mkdir(parents=True)
    if init is not None:
        (site / "esper" / "__init__.py").write_text(init)
    (site / "esper-3.9.dist-info").mkdir()
    (site / "esper-3.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: esper\nVersion: 3.9\n"
    )


def python(
    code: str, *paths: Path, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run code with the given directories on ``sys.path``."""
    command = [sys.executable, *flags, "-c", code, "--version"]
    return ran(command, PYTHONPATH=os.pathsep.join(map(str, paths)))


def refused(found: subprocess.CompletedProcess[str]) -> str:
    """The one line with which the command refused to run."""
    assert found.returncode == 2
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith("esper: ")
    return line


def test_the_namesake_before_an_editable_installation_is_named(tmp_path: Path) -> None:
    namesake(tmp_path)
    line = refused(python(COMMAND, tmp_path, SOURCE))
    assert "pip uninstall esper, then pip install --force-reinstall --no-deps esper-growth" in line


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory into which both packages are installed, Esper without its ``__init__.py``."""
    namesake(tmp_path, init=None)
    for entry in (SOURCE / "esper").iterdir():
        if entry.name != "__init__.py":
            (tmp_path / "esper" / entry.name).symlink_to(entry)
    (tmp_path / "esper_growth.py").symlink_to(SOURCE / "esper_growth.py")
    return tmp_path


def test_the_namesake_installed_over_esper_is_named(shared: Path) -> None:
    (shared / "esper" / "__init__.py").write_text("__version__ = '3.9'\n")
    assert "the package esper (an entity component system) has taken" in refused(
        python(COMMAND, shared)
    )


def test_what_uninstalling_the_namesake_left_behind_is_named(shared: Path) -> None:
    (shared / "esper-3.9.dist-info" / "METADATA").unlink()
    (shared / "esper-3.9.dist-info").rmdir()
    # Without -S, an editable installation in this environment would be found.
    line = refused(python(COMMAND, shared, flags=("-S",)))
    assert "esper/__init__.py is missing" in line


def test_a_file_of_the_users_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "esper.py").write_text("")
    assert f"{tmp_path / 'esper.py'} has taken" in refused(python(COMMAND, tmp_path, SOURCE))


def test_esper_runs_where_it_was_installed_last(shared: Path) -> None:
    (shared / "esper" / "__init__.py").symlink_to(SOURCE / "esper" / "__init__.py")
    found = python(COMMAND, shared)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("esper ")


def test_a_name_of_the_namesake_says_which_package_this_is(shared: Path) -> None:
    (shared / "esper" / "__init__.py").symlink_to(SOURCE / "esper" / "__init__.py")
    found = python("import esper; esper.create_entity", shared)
    assert "'create_entity'; this is Esper, of esper-growth" in found.stderr.splitlines()[-1]


def test_without_the_namesake_a_missing_name_is_only_missing() -> None:
    last = python("import esper; esper.create_entity", SOURCE).stderr.splitlines()[-1]
    assert last == "AttributeError: module 'esper' has no attribute 'create_entity'"
