"""Imports go only downward."""

import ast
from pathlib import Path

import pytest

import esper

ROOT = Path(esper.__file__).parent
LAYERS = ("leyline", "kasmina", "runtime", "tolaria", "tamiyo", "simic", "scripts")
ALLOWED = {
    **{layer: set(LAYERS[: i + 1]) for i, layer in enumerate(LAYERS)},
    "nissa": {"leyline", "nissa"},
    "karn": {"leyline", "karn"},
}
ALLOWED["simic"] |= {"nissa"}
ALLOWED["scripts"] |= {"nissa", "karn"}
MODULES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The packages directly under ``esper`` that a module imports, in whatever way."""
    here = ("esper", *path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "esper" and len(parts) > 1:
                found.add(parts[1])
    return found


def test_there_are_modules_and_no_package_the_order_does_not_know() -> None:
    assert len(MODULES) > 30
    assert {p.relative_to(ROOT).parts[0] for p in MODULES if p.parent != ROOT} <= set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below(path) -> None:
    parts = path.relative_to(ROOT).parts
    layer = parts[0] if len(parts) > 1 else None
    known = imported(path) & set(ALLOWED)
    assert known <= (ALLOWED[layer] if layer else set()), sorted(known)


def test_imports_are_found_in_every_spelling(tmp_path, monkeypatch) -> None:
    source = "\n".join(
        [
            "import esper.kasmina.rng",
            "from esper.tolaria import engine",
            "from esper import karn as reader",
            "from ..nissa import hub",
            "from ...simic.ppo import PPOAgent",
            "def late():",
            "    from .. import tamiyo",
            "import torch, essay.scripts",
        ]
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    deep, shallow = tmp_path / "a" / "b" / "deep.py", tmp_path / "a" / "shallow.py"
    deep.parent.mkdir(parents=True)
    deep.write_text(source)
    shallow.write_text(source.replace("...", ".."))
    assert imported(deep) == {"kasmina", "tolaria", "karn", "simic", "a"}
    assert imported(shallow) == {"kasmina", "tolaria", "karn", "nissa", "simic", "tamiyo"}


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in MODULES}),
    ids=lambda folder: str(folder.relative_to(ROOT)),
)
def test_every_package_says_what_it_is_for(folder) -> None:
    start = folder / "__init__.py"
    assert start.exists()
    assert ast.get_docstring(ast.parse(start.read_text()))
