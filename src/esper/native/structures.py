"""The structures and enumerations of each ``calls.h``, parsed from its source text.

Each definition thus exists only in C++. A compiled library contains the layout that the compiler
chose, and ``check_layout`` compares it with the layout of ctypes when the library is loaded.
"""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

SOURCE = Path(__file__).parent / "src"
PARTS = ("hosts", "policy")
"""The folders of ``SOURCE``, each with a ``calls.h`` and a ``library.cpp``."""

_NUMBERS: dict[str, type] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
}
_DEFINITION = re.compile(r"(template <class T>\s*)?(enum class|enum|struct) (\w+)[^{;]*{([^}]*)};")
_DECLARATION = re.compile(r"(?:const )?(\w+)\b([\s\w*,]+)")


class LayoutError(Exception):
    """The library was compiled with a different ``calls.h``; the message names the field."""


class Struct(ctypes.Structure):
    """A structure of a ``calls.h``. All fields must be given by keyword.

    Raises:
        TypeError: a field is missing or unknown.
    """

    names: ClassVar[tuple[str, ...]] = ()
    cpp: ClassVar[str] = ""
    """Qualified name in C++."""

    def __init__(self, **fields: Any):
        wrong = fields.keys() ^ set(self.names)
        if wrong:
            raise TypeError(
                f"{type(self).__name__}: missing or unknown: {', '.join(sorted(wrong))}"
            )
        super().__init__(**fields)


@dataclass(frozen=True, slots=True)
class Definitions:
    """Definitions of a ``calls.h``; each structure is also an attribute.

    Attributes:
        structs: structures by name.
        enums: members of each enumeration, by name.
    """

    structs: dict[str, type[Struct]]
    enums: dict[str, tuple[str, ...]]

    def __getattr__(self, name: str) -> Any:
        if name not in self.structs:
            raise AttributeError(name)
        return self.structs[name]


@cache
def definitions(part: str, source: Path = SOURCE) -> Definitions:
    """The definitions in the ``calls.h`` of ``part``, one of ``PARTS``.

    Raises:
        ValueError: a declaration cannot be parsed.
    """
    text = re.sub(r"//[^\n]*", "", (source / part / "calls.h").read_text())
    result = Definitions({}, {})
    for template, what, name, body in _DEFINITION.findall(text):
        if what != "struct":
            result.enums[name] = tuple(re.findall(r"\w+", body))
            continue
        fields = list(_fields(body, result))
        names = tuple(field for field, _ in fields)
        cpp = f"esper::{part}::{name}{'<float>' if template else ''}"
        result.structs[name] = type(
            name, (Struct,), {"names": names, "cpp": cpp, "_fields_": fields}
        )
    return result


def _fields(body: str, scope: Definitions) -> Iterator[tuple[str, type]]:
    """Names and types of the fields of a structure: addresses, numbers and structures."""
    types = _NUMBERS | scope.structs | dict.fromkeys(scope.enums, ctypes.c_int32)
    for declaration in filter(None, map(str.strip, body.split(";"))):
        match = _DECLARATION.fullmatch(declaration)
        if match is None:
            raise ValueError(f"calls.h: {declaration!r} cannot be parsed")
        for declarator in match[2].split(","):
            if "*" not in declarator and match[1] not in types:
                raise ValueError(f"calls.h: the type of {declaration!r} is unknown")
            kind = ctypes.c_void_p if "*" in declarator else types[match[1]]
            yield re.findall(r"\w+", declarator)[-1], kind


def _layout(source: Path) -> Iterator[tuple[str, int, str]]:
    """Sizes, offsets and enumerators: name, value in Python, expression in C++."""
    for part in PARTS:
        part_definitions = definitions(part, source)
        for name, struct in part_definitions.structs.items():
            for field in struct.names:
                expression = f"offsetof({struct.cpp}, {field})"
                yield f"{name}.{field}", getattr(struct, field).offset, expression
            yield f"the size of {name}", ctypes.sizeof(struct), f"sizeof({struct.cpp})"
        for name, members in part_definitions.enums.items():
            for number, member in enumerate(members):
                yield f"{name}.{member}", number, f"esper::{part}::{name}::{member}"


def layout_source(source: Path = SOURCE) -> str:
    """C++ source of a table with the layout that the compiler chooses for ``source``."""
    includes = [f'#include "{part}/calls.h"' for part in PARTS]
    entries = [f'    {{"{name}", int({cpp})}},' for name, _, cpp in _layout(source)]
    return "\n".join(
        [
            "#include <cstddef>",
            *includes,
            'extern "C" const struct { const char* name; int value; } esper_layout[] = {',
            *entries,
            "    {nullptr, 0}};\n",
        ]
    )


class _Entry(ctypes.Structure):
    """An entry of ``layout_source``."""

    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_int)]


def check_layout(library: ctypes.CDLL) -> None:
    """Compare the structures in Python with those that ``library`` was compiled with.

    Raises:
        LayoutError: a field, a size or a member of an enumeration differs.
    """
    layout = {name: value for name, value, _ in _layout(SOURCE)}
    table, library_layout = (
        ctypes.cast(library.esper_layout, ctypes.POINTER(_Entry)),
        dict[str, int](),
    )
    for number in count():
        entry = table[number]
        if entry.name is None:
            break
        library_layout[entry.name.decode()] = entry.value
    for name in [*(library_layout.keys() ^ layout.keys()), *layout]:
        library_value, value = library_layout.get(name, "missing"), layout.get(name, "missing")
        if library_value != value:
            raise LayoutError(
                f"native library: {name} is {library_value} in the library and {value} in calls.h"
            )
