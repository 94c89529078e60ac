"""Measure the house: lines per package, sizes of functions, and names that are no nouns.

    python scripts/house.py                          one table for every package
    python scripts/house.py --names simic/offline    names of a folder that are no nouns, by file

``tests/test_house.py`` holds the figures to the budgets of ``docs/packages.md``.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "src"
SUFFIXES = (".py", ".h", ".cpp")

IRREGULAR = (
    "bent born borne bound bought broken built caught chosen cut drawn driven fallen felt found "
    "given gone grown heard held hit kept known laid led left lent lost made meant met paid put "
    "read said seen sent shown shut sold sought spent split spoken spread stuck taken thrown told "
    "torn understood won worn written"
)
"""Past participles that do not end in ``ed``."""

VAGUE = "few here many other others own owned place places rest same such there thing things whole"
"""Words that stand in for the noun of a quantity."""

NOUNS = "bed bound embed feed feeds need red seed speed"
"""Nouns and verbs that end in ``ed``."""

FIELD_TERMS = (
    "done terminated truncated hidden fossilised fossilized germinated pruned embargoed frozen "
    "fused enabled required shared padded packed masked grown split read cut put embed"
)
"""Participles that are the field's own term, a keyword of a library, or also a noun or a verb."""


@dataclass(frozen=True, slots=True)
class Functions:
    """Lengths and parameter counts of the functions of some files."""

    lengths: dict[str, int]
    """Lines of each function, docstring included, by ``file:name``."""
    parameters: dict[str, int]
    """Parameters of each function that is not public API, by ``file:name``."""


def lines(folder: Path) -> int:
    """Lines of Python and C++ below ``folder``, blank lines and comments included."""
    files = [path for path in folder.rglob("*") if path.suffix in SUFFIXES]
    return sum(len(path.read_text().splitlines()) for path in files)


def package_lines(source: Path = SOURCE) -> dict[str, int]:
    """Lines of every package of ``esper``, of what lies beside them, and of the laboratory."""
    esper = source / "esper"
    packages = sorted(path for path in esper.iterdir() if (path / "__init__.py").exists())
    table = {f"esper.{path.name}": lines(path) for path in packages}
    loose = [*esper.glob("*.py"), *source.glob("*.py")]
    table["esper"] = sum(len(path.read_text().splitlines()) for path in loose)
    if (source / "esper_lab").exists():
        table["esper_lab"] = lines(source / "esper_lab")
    return table


def modules(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every Python file below ``folder`` with its syntax tree."""
    for path in sorted(folder.rglob("*.py")):
        yield str(path.relative_to(folder)), ast.parse(path.read_text())


def functions(folder: Path) -> Functions:
    """Measure every function below ``folder``."""
    sizes = Functions({}, {})
    for file, tree in modules(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{file}:{node.name}"
                sizes.lengths[name] = node.end_lineno - node.lineno + 1 if node.end_lineno else 1
                every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                sizes.parameters[name] = sum(x.arg not in ("self", "cls", "ctx") for x in every)
    return sizes


def bindings(tree: ast.AST) -> Iterator[str]:
    """Every name that a file binds: variables, arguments, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def is_no_noun(name: str) -> bool:
    """Whether a name is a bare participle or a vague word instead of the noun of a quantity."""
    word = name.strip("_").lower()
    if word in f"{FIELD_TERMS} {NOUNS}".split():
        return False
    return word in f"{IRREGULAR} {VAGUE}".split() or re.fullmatch("[a-z]{2,}ed", word) is not None


def names(folder: Path) -> tuple[int, dict[str, Counter[str]]]:
    """Count the bindings below ``folder``, and those of each file that are no nouns."""
    total, by_file = 0, {}
    for file, tree in modules(folder):
        every = [name for name in bindings(tree) if name != "_"]
        total += len(every)
        if bad := Counter(name for name in every if is_no_noun(name)):
            by_file[file] = bad
    return total, by_file


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", type=Path, default=SOURCE / "esper", help="package to measure")
    parser.add_argument("--names", metavar="FOLDER", help="list the names of a folder of it")
    options = parser.parse_args()
    root = options.root.resolve()
    if options.names is not None:
        folder = root / options.names
        for file, bad in names(folder)[1].items():
            print(f"{file}: {', '.join(f'{name} {count}' for name, count in bad.most_common())}")
    for package, count in package_lines(root.parent).items():
        print(f"{package:20} {count:7,}")
    lengths = list(functions(root).lengths.values())
    print(f"functions: {len(lengths)}, median {median(lengths):.0f} lines, ", end="")
    print(f"95 % {quantiles(lengths, n=20)[-1]:.0f}, longest {max(lengths)}")
    longest = sorted(functions(root).lengths.items(), key=lambda item: -item[1])[:8]
    print("longest: " + ", ".join(f"{name} {length}" for name, length in longest))
    most = sorted(functions(root).parameters.items(), key=lambda item: -item[1])[:8]
    print("most parameters: " + ", ".join(f"{name} {count}" for name, count in most))
    total, by_file = names(root)
    bad_total = sum(sum(bad.values()) for bad in by_file.values())
    print(f"names that are no nouns: {bad_total} of {total} bindings, {bad_total / total:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
