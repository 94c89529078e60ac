"""Writes docs/events.md from the schema of events, metrics, bounds of anomalies and views.

python scripts/write_event_docs.py [--check]
"""

import argparse
import ast
import inspect
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import msgspec

from esper.karn.queries import Store
from esper.leyline.anomaly_kinds import KINDS, Thresholds
from esper.leyline.events import EVENTS, LEVELS, SCHEMA_VERSION, Event
from esper.leyline.metrics import METRICS, PER_HEAD, Metric

TARGET = Path(__file__).parents[1] / "docs" / "events.md"

HEAD = """# Events

Made by `python scripts/write_event_docs.py` from `esper.leyline.events`, `esper.leyline.metrics`
and `esper.leyline.anomaly_kinds`; change those and make it anew.

This is schema {version}. An event is one line of JSON in `events.jsonl`, its name under
`event_type`. A float that is not finite is the text `NaN`, `Infinity` or `-Infinity` (in the tables
below: number); null means missing. A field with a default may be absent: lines of an older schema
do not have it. How events get there, and what becomes of those that cannot:
[telemetry](telemetry.md).
"""


def page() -> str:
    """The page."""
    parts = [HEAD.format(version=SCHEMA_VERSION), *map(_event, EVENTS.values())]
    parts.append("## Metrics of an update\n\n" + _metrics())
    parts.append("## Anomalies\n\n" + _anomalies())
    parts.append("## Views\n\n" + _views())
    return "\n".join(parts)


def _event(kind: type[Event]) -> str:
    name = str(kind.__struct_config__.tag)
    level = next(level for level, kinds in LEVELS.items() if kind in kinds)
    notes = field_notes(kind)
    rows = ["| field | type | |", "|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        rows.append(f"| `{field.name}` | {_type(field)} | {notes[field.name]} |")
    text = _flat(inspect.getdoc(kind) or "")
    return f"## {name}\n\n{text} Written from level `{level}` on.\n\n" + "\n".join(rows) + "\n"


def _type(field: msgspec.structs.FieldInfo) -> str:
    """The field's type in words, with its default."""
    words = _words(msgspec.inspect.type_info(field.type))
    if field.required:
        return words
    default = field.default
    if default is msgspec.NODEFAULT:
        default = field.default_factory()
    return f"{words}, default `{msgspec.json.encode(default).decode()}`"


def _words(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.ListType():
            return f"list of {_words(info.item_type)}"
        case msgspec.inspect.DictType():
            return f"{_words(info.value_type)} by name"
        case msgspec.inspect.UnionType():
            parts = [_words(part) for part in info.types]
            words = "number" if any("NaN" in part for part in parts) else parts[0]
            return f"{words} or null" if "null" in parts else words
        case msgspec.inspect.LiteralType():
            return " ".join(map(str, info.values))
    names = {"Int": "integer", "Float": "finite number", "Bool": "boolean", "Str": "text"}
    return (names | {"None": "null"})[type(info).__name__.removesuffix("Type")]


def field_notes(kind: type) -> dict[str, str]:
    """The docstring under each field, those of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("esper."):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, note in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    assert isinstance(note, ast.Expr), (kind, field.target.id)
                    assert isinstance(note.value, ast.Constant)
                    found[field.target.id] = _flat(str(note.value.value))
    return found


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def _metrics() -> str:
    rows = ["Means over the minibatches of an update where nothing else is said.\n"]
    rows += ["| metric | |", "|---|---|"]
    rows += [f"| `{name}` | {text} |" for name, text in METRICS.items() if "/" not in name]
    rows += [f"| `{name}/HEAD` | {text} |" for name, text in PER_HEAD.items()]
    rows.append(f"| `{Metric.VALUE_GRAD_NORM}` | {METRICS[Metric.VALUE_GRAD_NORM]} |")
    rows.append(f"| `{Metric.LEARNING_RATE}/GROUP` | step size of one group of parameters |")
    return "\n".join(rows) + "\n"


def _anomalies() -> str:
    rows = ["| kind | |", "|---|---|", *(f"| `{kind}` | {text} |" for kind, text in KINDS.items())]
    notes = field_notes(Thresholds)
    rows += ["", "The bounds:", "", "| bound | value | for |", "|---|---|---|"]
    for field in fields(Thresholds):
        rows.append(f"| `{field.name}` | {field.default:g} | {notes[field.name]} |")
    return "\n".join(rows) + "\n"


def _views() -> str:
    lines = [
        "What `esper query` sees, besides one table an event under its name in small letters.\n"
    ]
    with Store([]) as store:
        for view, columns in store.columns().items():
            told = ", ".join(f"`{name}` {kind}" for name, kind in columns)
            lines.append(f"**{view}**: {told}\n")
    return "\n".join(lines)


def main() -> int:
    """Write the page, or with ``--check`` say whether it is as it would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    if parser.parse_args().check:
        if TARGET.exists() and TARGET.read_text() == page():
            return 0
        print("docs/events.md is stale; run python scripts/write_event_docs.py", file=sys.stderr)
        return 1
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
