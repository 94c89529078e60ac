"""The structures and enumerations of ``calls.h``, parsed from its source text.

Each definition thus exists only in C++. ``layout_source`` makes the compiler compare its layout
with that of ctypes, so a library in which they differ cannot be built.
"""

import ctypes
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

SOURCE = Path(__file__).parent / "src"

_NUMBERS: dict[str, type] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_DEFINITION = re.compile(r"(template <class T>\s*)?(enum class|enum|struct) (\w+)[^{;]*{([^}]*)};")
_DECLARATION = re.compile(r"(?:const )?(\w+)\b([\s\w*,]+)")


class Struct(ctypes.Structure):
    """A structure of ``calls.h``. All fields must be given by keyword.

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
    """Definitions of ``calls.h``; each structure is also an attribute.

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
def definitions(source: Path = SOURCE) -> Definitions:
    """The definitions in ``hosts/calls.h``.

    Raises:
        ValueError: a declaration cannot be parsed.
    """
    text = re.sub(r"//[^\n]*", "", (source / "hosts" / "calls.h").read_text())
    calls = Definitions({}, {})
    for template, what, name, body in _DEFINITION.findall(text):
        if what != "struct":
            calls.enums[name] = tuple(re.findall(r"\w+", body))
            continue
        fields = list(_fields(body, calls.enums))
        names = tuple(field for field, _ in fields)
        cpp = f"esper::hosts::{name}{'<float>' if template else ''}"
        calls.structs[name] = type(
            name, (Struct,), {"names": names, "cpp": cpp, "_fields_": fields}
        )
    return calls


def _fields(body: str, enums: Iterable[str]) -> Iterator[tuple[str, type]]:
    """Names and types of the fields of a structure: addresses, numbers and enumerations."""
    types = _NUMBERS | dict.fromkeys(enums, ctypes.c_int32)
    for declaration in filter(None, map(str.strip, body.split(";"))):
        match = _DECLARATION.fullmatch(declaration)
        if match is None:
            raise ValueError(f"calls.h: {declaration!r} cannot be parsed")
        for declarator in match[2].split(","):
            if "*" not in declarator and match[1] not in types:
                raise ValueError(f"calls.h: the type of {declaration!r} is unknown")
            kind = ctypes.c_void_p if "*" in declarator else types[match[1]]
            yield re.findall(r"\w+", declarator)[-1], kind


def layout_source() -> str:
    """C++ source that compiles only if the compiler lays out the structures as ctypes does."""
    lines, calls = ["#include <cstddef>", '#include "hosts/calls.h"'], definitions()
    for name, struct in calls.structs.items():
        for field in struct.names:
            offset = f"offsetof({struct.cpp}, {field}) == {getattr(struct, field).offset}"
            lines.append(f'static_assert({offset}, "{name}.{field}");')
        size = f"sizeof({struct.cpp}) == {ctypes.sizeof(struct)}"
        lines.append(f'static_assert({size}, "the size of {name}");')
    for name, members in calls.enums.items():
        for number, member in enumerate(members):
            value = f"int(esper::hosts::{name}::{member}) == {number}"
            lines.append(f'static_assert({value}, "{name}.{member}");')
    return "\n".join([*lines, ""])
