"""Mutants: small faults drawn at random from the syntax of the whole source.

A mutant changes one place of one file: an operator, a condition, a number, a truth value, a
returned value, or a statement that is left out. Text for people (messages, docstrings),
annotations, imports and assertions are left alone. The operators are those of DeMillo, Lipton and
Sayward (1978, "Hints on Test Data Selection") as far as they exist in Python and C++.
"""

import ast
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
CPP_TOKENS = {
    " < ": " <= ",
    " > ": " >= ",
    " <= ": " < ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + ": " - ",
    " - ": " + ",
    " * ": " / ",
    " / ": " * ",
    " += ": " -= ",
    " -= ": " += ",
    "true": "false",
    "false": "true",
    "T(0)": "T(1)",
    "T(1)": "T(2)",
}
"""Tokens of C++, with their spaces, by which templates and pointers are told from operators."""
_CPP_TOKEN = re.compile(
    r"(?P<skip>//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|^\s*#[^\n]*|static_assert\([^;]*;"
    r"|template\s*<[^>]*>)|(?P<token>"
    + "|".join(map(re.escape, sorted(CPP_TOKENS, key=len, reverse=True)))
    + ")",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        stratum: the package that it belongs to.
        path: the file, relative to the root of the repository.
        line: line of the fault, from 1.
        begin, end: bytes of the file that it replaces.
        original, replacement: what stands there, and what stands there instead.
    """

    stratum: str
    path: str
    line: int
    begin: int
    end: int
    original: str
    replacement: str

    @property
    def name(self) -> str:
        """The fault in a line."""
        before, after = (" ".join(text.split()) for text in (self.original, self.replacement))
        return f"{self.path}:{self.line}: {before} -> {after}"

    def applied(self, source: bytes) -> bytes:
        """The file with the fault."""
        assert source[self.begin : self.end] == self.original.encode()
        return source[: self.begin] + self.replacement.encode() + source[self.end :]


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw at least ``count`` mutants, as many from each package, no two from one line.

    Every draw is reproducible from ``seed`` and the source.
    """
    strata: dict[str, list[Mutant]] = {}
    for mutant in every_mutant(root):
        strata.setdefault(mutant.stratum, []).append(mutant)
    generator, drawn = random.Random(seed), []
    for stratum in sorted(strata):
        lines: dict[tuple[str, int], Mutant] = {}
        for mutant in generator.sample(strata[stratum], len(strata[stratum])):
            lines.setdefault((mutant.path, mutant.line), mutant)
        drawn += list(lines.values())[: math.ceil(count / len(strata))]
    return drawn


def every_mutant(root: Path) -> Iterator[Mutant]:
    """Every mutant of the source below ``root``, in the order of files and bytes."""
    for path in sorted((root / "src").rglob("*")):
        if path.suffix not in (".py", ".h", ".cpp"):
            continue
        name, source = path.relative_to(root).as_posix(), path.read_bytes()
        find = _python if path.suffix == ".py" else _cpp
        for begin, end, replacement in sorted(set(find(source))):
            original, line = source[begin:end].decode(), source[:begin].count(b"\n") + 1
            yield Mutant(_stratum(name), name, line, begin, end, original, replacement)


def _stratum(path: str) -> str:
    parts = path.split("/")
    if len(parts) < 4:
        return parts[1] if parts[1] == "esper_lab" else "scripts"
    return parts[2] if path.endswith(".py") else f"{parts[2]} (C++)"


def _cpp(source: bytes) -> Iterator[tuple[int, int, str]]:
    # Tokens are ASCII, and so are offsets once every other byte counts as one character.
    for match in _CPP_TOKEN.finditer(source.decode("latin-1")):
        if match["token"]:
            yield *match.span("token"), CPP_TOKENS[match["token"]]


def _python(source: bytes) -> Iterator[tuple[int, int, str]]:
    lines = [0]
    for text in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(text))
    yield from _Places(source, lines).of(ast.parse(source))


class _Places:
    """The places of a Python file where a fault can be.

    Args:
        source: the file.
        lines: the offset of each line.
    """

    def __init__(self, source: bytes, lines: list[int]):
        self._source, self._lines = source, lines

    def of(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Begin, end and replacement of every fault in ``node``."""
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        yield from self._here(node)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.of(child)

    def _here(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, right, operator in zip(sides, sides[1:], node.ops, strict=False):
                yield from self._between(left, right, *COMPARISONS[type(operator)])
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
            if not text:
                yield from self._between(node.left, node.right, *ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._begin(node), self._begin(node) + len("not "), ""
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                begin, end = self._begin(node.test), self._end(node.test)
                yield begin, end, f"not ({self._source[begin:end].decode()})"
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield self._begin(node.value), self._end(node.value), "None"
        elif isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield self._begin(node), self._end(node), "pass"

    def _constant(self, node: ast.Constant) -> Iterator[tuple[int, int, str]]:
        value = node.value
        if isinstance(value, bool):
            yield self._begin(node), self._end(node), str(not value)
        elif isinstance(value, int):
            yield self._begin(node), self._end(node), str(value + 1)
        elif isinstance(value, float):
            yield self._begin(node), self._end(node), str(value * 2 if value else 1.0)

    def _between(
        self, left: ast.expr, right: ast.expr, operator: str, replacement: str
    ) -> Iterator[tuple[int, int, str]]:
        begin, end = self._end(left), self._begin(right)
        gap = re.sub(rb"#[^\n]*", lambda match: b" " * len(match[0]), self._source[begin:end])
        word = re.escape(operator).replace(r"\ ", r"\s+")
        if match := re.search(word.encode(), gap):
            yield begin + match.start(), begin + match.end(), replacement

    def _begin(self, node: ast.stmt | ast.expr) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset
