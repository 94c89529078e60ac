"""The faults of the mutation run: each changes its place alone, and the draw is reproducible."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("scripts_on_path")

SOURCE = '''
def function(x: int = 3, flag: bool = True) -> int | None:
    """Text with 1 < 2 is left alone."""
    assert x > 0
    if flag and not x >= 2:
        raise ValueError(f"message {x + 1}")
    note(x)
    x += 1.5
    return x * (x  # a comment with / in it
                - 2)
'''
CPP = "#include <a>\n// a < b\nint f(int a) { return a < 1 && a + 2 > T(0) ? a : g<int>(a); }\n"


def drawn(tmp_path: Path, name: str, text: str) -> Counter[tuple[str, str]]:
    from mutants import every_mutant

    path = tmp_path / "src" / "esper" / "nissa" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return Counter((m.original.strip(), m.replacement.strip()) for m in every_mutant(tmp_path))


def test_a_python_file_has_the_mutants_of_its_operators_and_statements(tmp_path: Path) -> None:
    expected = [
        ("3", "4"), ("True", "False"), ("and", "or"), ("not", ""), (">=", ">"),
        ("2", "3"), ("note(x)", "pass"), ("x += 1.5", "pass"), ("1.5", "3.0"), ("*", "/"),
        ("-", "+"), ("2", "3"),
    ]  # fmt: skip
    table = drawn(tmp_path, "file.py", SOURCE)
    returned = [pair for pair in table if pair[1] == "None"]
    assert len(returned) == 1
    assert table == Counter(expected) + Counter(returned)


def test_a_cpp_file_has_the_mutants_of_its_operators(tmp_path: Path) -> None:
    expected = [("<", "<="), ("&&", "||"), ("+", "-"), (">", ">="), ("T(0)", "T(1)")]
    assert drawn(tmp_path, "file.h", CPP) == Counter(expected)


def test_a_draw_is_spread_over_packages_parses_and_is_reproducible() -> None:
    from mutants import draw

    mutants = draw(ROOT, 120, 5)
    assert mutants == draw(ROOT, 120, 5) != draw(ROOT, 120, 6)
    assert max(Counter(m.stratum for m in mutants).values()) <= 120 / 12
    for mutant in mutants:
        source = (ROOT / mutant.path).read_bytes()
        changed = mutant.applied(source)
        assert changed != source
        if mutant.path.endswith(".py"):
            ast.parse(changed)


def test_what_is_computed_once_is_told_from_what_is_called() -> None:
    from mutation import names_of_what_is_computed_once

    source = (
        "A = 1\ndef f(x=2):\n    return 3\nclass B:\n    c = 4\n    def __init__(self, x=5):\n"
        "        6\n@cache\ndef g():\n    return 7\n"
    )
    expected = {1: "A", 2: "f", 4: "B", 5: "c", 6: "B", 10: "g"}
    for line in (1, 2, 3, 4, 5, 6, 7, 10):
        names = names_of_what_is_computed_once(source, line)
        assert names == ({expected[line]} if line in expected else set()), line
