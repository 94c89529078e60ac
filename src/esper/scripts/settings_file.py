"""Reading of a JSON file of settings."""

import json
from pathlib import Path
from typing import Any

from esper.leyline.config import canonical
from esper.leyline.errors import UsageError


def settings_file(path: Path) -> dict[str, Any]:
    """Return the settings of a flat JSON file by name, aliases resolved.

    Raises:
        UsageError: the file cannot be read, or a key is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise UsageError(f"config_json: cannot read {path} ({error.strerror})") from error
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"config_json: {path} is not JSON ({error}); correct it") from error
    if not isinstance(content, dict):
        raise UsageError(f"config_json: {path} must hold one object of settings")
    return canonical(content)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert a JSON object to a dictionary; refuse a key that appears twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{duplicate}: appears twice in the settings file; keep one of them")
    return content
