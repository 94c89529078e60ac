"""A JSON file of settings."""

import json
from pathlib import Path
from typing import Any

from esper.leyline.config import canonical
from esper.leyline.errors import UsageError


def settings_file(path: Path) -> dict[str, Any]:
    """The settings of a flat JSON file by name, aliases resolved.

    Raises:
        UsageError: it cannot be read, or a key is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise UsageError(f"config_json: cannot read {path} ({error.strerror})") from error
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"config_json: {path} is not JSON ({error}); mend it") from error
    if not isinstance(content, dict):
        raise UsageError(f"config_json: {path} must hold one object of settings")
    return canonical(content)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key stands twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{double}: stands twice in the settings file; keep one of them")
    return content
