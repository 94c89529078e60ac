"""Command lines and JSON files to settings, checked against the fields they fill."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from esper.leyline.config import ALIASES, canonical, described, options_of, shown
from esper.leyline.errors import UsageError


def read_flags(program: str, arguments: list[str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a command line gives, by name, aliases resolved.

    Args:
        program: the command, for messages.
        arguments: flags and their values, ``--name value`` or ``--name=value``.
        kinds: the type of each setting that the command has.

    Raises:
        UsageError: an unknown flag, a value of the wrong type, or two values for one setting.
    """
    settings: dict[str, Any] = {}
    given: dict[str, str] = {}
    for flag, values in _split(arguments):
        if not flag:
            if values:
                raise UsageError(f"{program}: takes no {shown(values[0])}; write --NAME VALUE")
            continue
        name, on = _setting(program, flag, kinds)
        value = _value(flag, on, values, kinds[name])
        written = " ".join([flag, *values])
        if name in settings and settings[name] != value:
            raise UsageError(
                f"{name}: {given[name]} and {written} contradict each other; give one of them"
            )
        settings[name], given[name] = value, written
    return settings


def read_arguments(
    program: str,
    arguments: list[str],
    kinds: Mapping[str, Any],
    short: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """The arguments without a flag, which may stand anywhere, and the settings of the flags.

    Args:
        program: the command, for messages.
        arguments: as typed; behind ``--`` nothing is a flag.
        kinds: the type of each setting that the command has; a flag takes one value or, if it is a
            switch, none.
        short: other spellings of flags, such as ``-o``.

    Raises:
        UsageError: see ``read_flags``.
    """
    waiting = list(arguments)
    names: list[str] = []
    flags: list[str] = []
    while waiting:
        word = waiting.pop(0)
        flag = (short or {}).get(word, word)
        if flag == "--":
            return names + waiting, read_flags(program, flags, kinds)
        if not flag.startswith("-") or flag == "-":
            names.append(flag)
            continue
        # One dash begins a flag as well, so that a wrong one is not taken for a name.
        flags.append(flag if flag.startswith("--") else f"-{flag}")
        if "=" not in flag and waiting and bool not in options_of(_kind(program, flags[-1], kinds)):
            flags.append(waiting.pop(0))
    return names, read_flags(program, flags, kinds)


def _kind(program: str, flag: str, kinds: Mapping[str, Any]) -> Any:
    return kinds[_setting(program, flag, kinds)[0]]


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


def _setting(program: str, flag: str, kinds: Mapping[str, Any]) -> tuple[str, bool]:
    """The setting that ``flag`` names, and whether it switches it on (``--no-NAME``: off)."""
    originals = {alias: name for name in kinds for alias in ALIASES.get(name, ())}
    key = flag.removeprefix("--").replace("-", "_")
    for spelling, on in ((key, True), (key.removeprefix("no_"), False)):
        name = originals.get(spelling, spelling)
        if name in kinds and (on or bool in options_of(kinds[name])):
            return name, on
    near = get_close_matches(key, [*kinds, *originals], 1)
    hint = (
        f"did you mean --{near[0].replace('_', '-')}?"
        if near
        else f"{program} --help lists all settings"
    )
    raise UsageError(f"{flag}: {program} has no such setting; {hint}")


def _value(flag: str, on: bool, values: list[str], kind: Any) -> Any:
    """What the texts behind ``flag`` stand for, as it would stand in a JSON file."""
    options = options_of(kind)
    if bool in options:
        if NoneType in options and values in (["None"], ["null"]):
            return None
        if values:
            raise UsageError(f"{flag}: takes no value, got {shown(values[0])}; write {flag} alone")
        return on
    if values and any(get_origin(option) is tuple for option in options):
        return values
    if len(values) != 1:
        got = " ".join(values) or "nothing"
        raise UsageError(f"{flag}: must be {described(kind)}, got {got}")
    (text,) = values
    if NoneType in options and text in ("None", "null"):
        return None
    for option in options:
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
        if get_origin(option) is Literal and text in get_args(option):
            return text
        if option is str or (option is Path and text):
            return option(text)
    raise UsageError(f"{flag}: must be {described(kind)}, got {shown(text)}")


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
