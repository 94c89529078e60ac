"""Command lines to settings: one parser for flags, JSON files and stored runs."""

import json
from pathlib import Path

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
        name = originals.get(key, key)
        if name not in given:
            given[name] = spelling, values
            result += ["--" + name.replace("_", "-"), *values]
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


def settings_file(path: Path) -> TrainConfig:
    """The settings of a flat JSON file.

    Raises:
        UsageError: it cannot be read, or a key or value is wrong.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"config_json: cannot read {path} ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"config_json: {path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"config_json: {path} must hold one object of settings")
    return unflatten(content)


def value_of(flag: str, arguments: list[str]) -> Path | None:
    """The value given to ``flag``, before the arguments are parsed in earnest."""
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if argument.startswith(flag + "="):
            return Path(argument.partition("=")[2])
    return None
