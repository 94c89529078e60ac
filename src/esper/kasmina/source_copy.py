"""Copies definitions and all that they use out of Esper and plugins, into a file of their own."""

import ast
import dis
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import Any

from esper.leyline.errors import UsageError

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


class SourceCopy:
    """The source of definitions and, before each, of those that it uses.

    Args:
        skip: names that the file defines by itself.

    Attributes:
        imports: lines that import from other libraries.
    """

    def __init__(self, skip: set[str]):
        self.imports: set[str] = set()
        self._definitions: list[str] = []
        self._namespaces: dict[str, set[str]] = {}
        self._skip = skip
        self._origins: dict[str, object] = {}

    @property
    def definitions(self) -> list[str]:
        """Sources of functions, classes and constants, each before its users, and namespaces with
        what is used of modules of Esper."""
        namespaces = [
            f"class {name}:\n    "
            + "\n    ".join(f"{x} = staticmethod({x})" for x in sorted(names))
            for name, names in self._namespaces.items()
        ]
        return self._definitions + namespaces

    def add_function(self, function: Callable[..., Any]) -> str:
        """Add a function or class that is defined at the top of a file; returns its name.

        Raises:
            UsageError: it is not, or another definition has the name of one that it uses.
        """
        inner = unwrap(function)
        path, name = _source_file(inner), inner.__name__
        if path is None or not Path(path).is_file() or name not in _statements(path):
            raise UsageError(
                f"blueprint: the written file needs the source of {name!r}; define it at the top "
                "level of a file"
            )
        self._add(path, name)
        return name

    def _add(self, path: str, name: str, user: ast.AST | None = None) -> None:
        """Add what ``name`` means in the file at ``path``; nothing if it is built in."""
        node = _statements(path).get(name)
        if node is None or name in self._skip:
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._add_imported(node, name, user)
        elif self._is_new(name, (path, node.lineno)):
            for used_name in _used_names(node):
                self._add(path, used_name, node)
            first = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])])
            lines = Path(path).read_text().splitlines()[first - 1 : node.end_lineno]
            self._definitions.append("\n".join(lines))

    def _add_imported(
        self, node: ast.Import | ast.ImportFrom, name: str, user: ast.AST | None
    ) -> None:
        (alias,) = (a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        if module.partition(".")[0] != "esper":
            line = ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]}))
            if self._is_new(name, line):
                self.imports.add(line)
            return
        origin = _origin(module)
        if isinstance(node, ast.ImportFrom) and alias.name in _statements(origin):
            self._add(origin, alias.name, user)
            if alias.asname and self._is_new(name, ("alias", origin, alias.name)):
                self._definitions.append(f"{name} = {alias.name}")
        elif user is not None and (alias.asname or isinstance(node, ast.ImportFrom)):
            full_name = f"{module}.{alias.name}" if isinstance(node, ast.ImportFrom) else module
            self._add_namespace(name, _origin(full_name), user)
        else:
            raise UsageError(
                f"blueprint: the written file cannot hold the module {module!r}; "
                f"write import {module} as a name"
            )

    def _add_namespace(self, name: str, origin: str, user: ast.AST) -> None:
        """Add what ``user`` uses of the module of Esper that it calls ``name``."""
        self._is_new(name, ("namespace", origin))
        for part in ast.walk(user):
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) == name:
                self._add(origin, part.attr)
                self._namespaces.setdefault(name, set()).add(part.attr)

    def _is_new(self, name: str, origin: object) -> bool:
        """Whether ``name`` has not been added before.

        Raises:
            UsageError: it has been, for something else.
        """
        if name not in self._origins:
            self._origins[name] = origin
            return True
        if self._origins[name] != origin:
            raise UsageError(
                f"blueprint: {name!r} has two meanings in the written file; rename that of the "
                "plugin"
            )
        return False


def _origin(module: str) -> str:
    """The file of a module of Esper."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def _source_file(part: Callable[..., Any]) -> str | None:
    """The file that defines a function or class."""
    if isinstance(part, type):
        return sys.modules[part.__module__].__file__
    return part.__code__.co_filename


@cache
def _statements(path: str) -> dict[str, ast.stmt]:
    """The statement at the top level of a file that gives each name its meaning."""
    by_name: dict[str, ast.stmt] = {}
    for node in ast.parse(Path(path).read_text()).body:
        for name in _defined_names(node):
            by_name[name] = node
    return by_name


def _defined_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


def _used_names(node: ast.stmt) -> list[str]:
    """Global names that a statement loads, also in its functions."""
    code = compile(ast.Module([node], []), "", "exec", dont_inherit=True)
    return [
        i.argval
        for each in _code_objects(code)
        for i in dis.get_instructions(each)
        if i.opname in _LOADS
    ]


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_objects(constant)
