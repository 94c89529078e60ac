"""Command lines to settings: one parser for flags, JSON files and stored runs."""

import json
from pathlib import Path
from typing import Any

from esper.leyline.config import ALIASES, TrainConfig, unflatten
from esper.leyline.errors import UsageError


def canonical_flags(arguments: list[str]) -> list[str]:
    """The arguments with every alias replaced by the flag it stands for.

    Raises:
        UsageError: one flag is given two different values.
    """
    originals = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
    result: list[str] = []
    given: dict[str, tuple[str, list[str]]] = {}
    for spelling, values in _split(arguments):
        if not spelling:
            result += values
            continue
        key = spelling.removeprefix("--").replace("-", "_")
        off = key.startswith("no_")
        key = key.removeprefix("no_")
        name = originals.get(key, key)
        if off:
            values = ["(off)", *values]
        if name not in given:
            given[name] = spelling, values
            flag = ("--no-" if off else "--") + name.replace("_", "-")
            result += [flag, *values[off:]]
        elif given[name][1] != values:
            first, before = given[name]
            raise UsageError(
                f"{name}: {' '.join([first, *before])} and {' '.join([spelling, *values])} "
                "contradict each other; give one of them"
            )
    return result


def _split(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """Flags with the values behind them; what comes before the first flag has no name."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            parts.append((flag, [value] if equals else []))
        else:
            parts[-1][1].append(argument)
    return parts


def settings_file(path: Path, base: TrainConfig | None = None) -> TrainConfig:
    """The settings of a flat JSON file, and those of ``base`` where it has none.

    Raises:
        UsageError: it cannot be read, or a key or value is wrong.
    """
    try:
        content = json.loads(path.read_text(), object_pairs_hook=_once)
    except OSError as error:
        raise UsageError(f"config_json: cannot read {path} ({error.strerror})") from error
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"config_json: {path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"config_json: {path} must hold one object of settings")
    return unflatten(content, base)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key stands twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{double}: stands twice in the settings file; keep one of them")
    return content


def value_of(flag: str, arguments: list[str]) -> Path | None:
    """The value given to ``flag``, before the arguments are parsed in earnest."""
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if argument.startswith(flag + "="):
            return Path(argument.partition("=")[2])
    return None
