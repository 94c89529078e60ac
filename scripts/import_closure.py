"""Print the modules of Esper that ``esper.grow`` needs, and how many lines they have.

    python scripts/import_closure.py [MODULE]

The static closure follows the imports at the top of each module, and lists apart what functions
import when they are called. With ``--run`` a process grows a small MLP instead, and prints the
modules that it loaded and the files whose functions it called.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "esper"
START = "esper.own_models.growing"
"""The module that holds ``esper.grow``."""

GROWING = """
import json, sys
from pathlib import Path

import torch
from torch.nn import Linear, ReLU, Sequential
import esper
from esper import grow

ROOT = str(Path(esper.__file__).parent)
torch.manual_seed(0)
model = Sequential(Linear(8, 16), ReLU(), Linear(16, 16), ReLU(), Linear(16, 3))
batches = [(torch.randn(32, 8), torch.randint(0, 3, (32,))) for _ in range(2)]
called = set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(ROOT):
        if frame.f_code.co_name != "<module>":
            called.add(frame.f_code.co_filename)

sys.setprofile(note)
result = grow(model, batches, batches, epochs=20, progress=False)
sys.setprofile(None)
files = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", 0)}
loaded = sorted(file for file in files if file.startswith(ROOT) and file.endswith(".py"))
print(json.dumps({"loaded": loaded, "called": sorted(called), "epochs": len(result.history)}))
"""
"""Grows three layers with the policy ``rule``, and prints the files that were loaded and called."""


def file_of(module: str) -> Path | None:
    """The file of a module of Esper; None if there is none of that name."""
    path = ROOT.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """The modules of Esper that a file imports, and whether a function does so when it is called.

    What is imported for type checkers alone is left out.
    """
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_text()), False)]
    while pending:
        node, late = pending.pop()
        late |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        pending += [(child, late) for child in ast.iter_child_nodes(node)]
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.split(".")[0] == "esper" and file_of(name) is not None:
                yield name, late


def closure(start: str) -> tuple[set[str], set[str]]:
    """The modules that importing ``start`` loads, and those that their functions import besides."""
    loaded: set[str] = set()
    late: set[str] = set()
    pending = [start]
    while pending:
        module = pending.pop()
        if module in loaded:
            continue
        loaded.add(module)
        if "." in module:
            pending.append(module.rpartition(".")[0])
        file = file_of(module)
        assert file is not None, module
        for name, in_function in imports(file):
            (late.add if in_function else pending.append)(name)
    return loaded, late - loaded


def lines(files: set[Path]) -> int:
    """Number of lines of the files."""
    return sum(len(file.read_text().splitlines()) for file in files)


def files_of(modules: set[str]) -> set[Path]:
    """The files of modules."""
    return {file for module in modules if (file := file_of(module)) is not None}


def grown() -> tuple[set[Path], set[Path]]:
    """The files that a process loads that grows a small MLP, and those whose functions it calls."""
    code = [sys.executable, "-c", GROWING]
    process = subprocess.run(code, capture_output=True, text=True, check=True)
    report = json.loads(process.stdout)
    return {Path(file) for file in report["loaded"]}, {Path(file) for file in report["called"]}


def show(title: str, files: set[Path]) -> None:
    """Print files with their lines, and the sum."""
    print(f"{title}: {lines(files):,} lines in {len(files)} files")
    for file in sorted(files):
        print(f"  {lines({file}):5}  {file.relative_to(ROOT)}")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", nargs="?", default=START)
    parser.add_argument("--run", action="store_true", help="grow a small MLP in a process")
    flags = parser.parse_args()
    if flags.run:
        files, called = grown()
        show("loaded", files)
        show("called", called)
        return
    loaded, late = closure(flags.module)
    show("imported at the top", files_of(loaded))
    show("imported in functions besides", files_of(late))


if __name__ == "__main__":
    main()
