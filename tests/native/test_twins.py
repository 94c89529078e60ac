"""Functions that exist in both Python and C++ name each other in comments."""

import ast
import re
from pathlib import Path

import esper
from esper.native.structures import SOURCE

ROOT = Path(esper.__file__).parent
IN_CPP = re.compile(r"^\s*// Twin of ([\w.]+)\.$")
IN_PYTHON = re.compile(r"^\s*# Native twin: ([\w/.]+), ([\w, ]+)\.$")
CPP_NAME = re.compile(r"(?:class|struct) (\w+)|(\w+)\(")
Pair = tuple[str, str, str]
"""File and name in C++, name in Python below ``esper``."""


def named_in_cpp() -> set[Pair]:
    """The pairs named by comments in C++."""
    found = set()
    for path in SOURCE.rglob("*.h"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if match := IN_CPP.match(line):
                rest = (x.strip() for x in lines[number + 1 :])
                defined = next(x for x in rest if not x.startswith(("//", "template")))
                name = next(filter(None, CPP_NAME.search(defined).groups()))
                found.add((str(path.relative_to(SOURCE)), name, match[1]))
    return found


def definitions(tree: ast.AST, within: str) -> dict[int, str]:
    """The names of functions and classes by the number of the line above them."""
    found = {}
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{within}.{node.name}"
            lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            found |= {min(lines) - 1: name} | definitions(node, name)
    return found


def named_in_python() -> set[Pair]:
    """The pairs named by comments in Python."""
    found = set()
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        names = definitions(ast.parse(text), module)
        for number, line in enumerate(text.splitlines(), 1):
            if match := IN_PYTHON.match(line):
                assert number in names, f"{path}:{number} stands above no function"
                found |= {(match[1], name, names[number]) for name in match[2].split(", ")}
    return found


def test_twin_comments_in_cpp_and_python_agree() -> None:
    cpp, python = named_in_cpp(), named_in_python()
    assert cpp - python == set(), "Python does not name these"
    assert python - cpp == set(), "C++ does not name these, or has them no more"
    rules = {name for *_, name in python}
    assert "tolaria.backends.torch.slot_block" in rules
    assert len(python) > 20


def test_every_twin_comment_has_the_parsed_form() -> None:
    """A comment in another form would not be compared."""
    for path in [*SOURCE.rglob("*.h"), *ROOT.rglob("*.py")]:
        for line in path.read_text().splitlines():
            if re.search(r"// Twin|# Native twin", line):
                assert IN_CPP.match(line) or IN_PYTHON.match(line), f"{path}: {line}"
