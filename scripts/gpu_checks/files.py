"""Files that are either complete or not there, whenever the process that writes them ends."""

import json
import os
from pathlib import Path
from typing import Any


def write(path: Path, text: str) -> None:
    """Replace a file at once."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file at once; NaN and infinities are written as text."""
    write(path, json.dumps(_plain(content), indent=2, default=str, allow_nan=False) + "\n")


def _plain(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(name): _plain(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, float) and not abs(content) < float("inf"):
        return str(content)
    return content
