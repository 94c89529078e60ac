"""Every public class, function and method has a docstring."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper

PACKAGE = Path(esper.__file__).parent
PACKAGES = ["leyline", "native", "nissa", "runtime", "scripts"]


def undocumented(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    """Public names below ``node`` without a docstring."""
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_"):
            continue
        if ast.get_docstring(child) is None:
            yield f"{prefix}{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from undocumented(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_public_has_a_docstring(package: str) -> None:
    missing = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for name in undocumented(ast.parse(path.read_text()), "")
    ]
    assert missing == []
