"""Parsing of command lines by tyro, from the fields of a command's dataclass.

tyro reports a wrong value in a box of several lines, and silently keeps the last of two values for
one flag. So it parses each flag apart: this shows which of them is wrong, and one line reports it.
"""

import re
from contextlib import redirect_stderr
from dataclasses import MISSING, Field, is_dataclass
from io import StringIO
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, NoReturn, TypedDict, TypeVar

import tyro

from esper.leyline.config.setting import (
    about,
    check_ranges,
    description,
    in_order,
    meanings,
    options_of,
    settings_of,
    shown,
    spellings,
)
from esper.leyline.errors import UsageError, suggestion
from esper.leyline.former_names import FLAGS

Command = TypeVar("Command")
_FLAG = re.compile("--.|-[a-zA-Z](=|$)", re.DOTALL)
"""Matches a word that is a flag and not a value."""


def parse(command: type[Command], program: str, arguments: list[str]) -> Command:
    """Parse a command line into the dataclass ``command``.

    Raises:
        UsageError: see ``read_flags``; or a required setting is missing, or one is out of range.
        SystemExit: help was asked for and has been printed.
    """
    settings = read_flags(command, program, arguments)
    for name, f in settings_of(command).items():
        if f.default is MISSING and name not in settings:
            argument = name if about(f).positional else _flag(name)
            raise UsageError(
                f"{name}: {program} needs {argument}; {help_flag(command)} shows all settings"
            )
    check_ranges(command, settings)
    return command(**settings)


def read_flags(command: type, program: str, arguments: list[str]) -> dict[str, Any]:
    """Return the settings that a command line gives, by name.

    Args:
        command: a dataclass of settings, or of dataclasses of settings.
        program: the command, for help and messages.
        arguments: as typed; after ``--`` nothing is a flag.

    Raises:
        UsageError: an unknown flag, a value of the wrong type, or two values for one setting.
        SystemExit: help was asked for and has been printed.
    """
    if not {"-h", "--help", HELP_ALL}.isdisjoint(arguments):
        _print_help(command, program, HELP_ALL in arguments)
    settings: dict[str, Any] = {}
    source_words: dict[str, str] = {}
    for words in _parts(arguments):
        for name, value in _alone(command, program, words).items():
            if about(settings_of(command)[name]).positional and name in settings:
                if not isinstance(value, tuple):
                    raise UsageError(f"{program}: takes one {name}, got {shown(value)} as well")
                value = settings[name] + value
            elif name in settings and settings[name] != value:
                raise UsageError(
                    f"{name}: {source_words[name]} and {' '.join(words)} contradict each other; "
                    "give one of them"
                )
            settings[name], source_words[name] = value, " ".join(words)
    return settings


def _print_help(command: type, program: str, complete: bool) -> NoReturn:
    """Print the help of a command: its main settings if it has many, or all.

    Raises:
        SystemExit: always.
    """
    settings, short = settings_of(command), not complete and _has_short_help(command)
    view = help_view(command, short=short)
    try:
        tyro.cli(view, args=["--help"], prog=program, config=(tyro.conf.OmitArgPrefixes,))
    finally:
        if short:
            print(f"\n{program} {HELP_ALL} shows all {len(settings)} settings")
    raise SystemExit(0)


def _has_short_help(command: type) -> bool:
    """Whether ``--help`` shows only the main settings of a command."""
    return any(about(f).main for f in settings_of(command).values())


def help_flag(command: type) -> str:
    """The flag that lists all settings of a command."""
    return HELP_ALL if _has_short_help(command) else "--help"


HELP_ALL = "--help-all"


def _entry(f: Field[Any], **texts: Any) -> Any:
    """The type of a field, annotated for tyro."""
    names = (f.name, *about(f).aliases)
    return Annotated[
        bool if bool in options_of(f.type) else f.type,
        *([tyro.conf.Positional] if about(f).positional else []),
        # tyro lists the name after the aliases.
        tyro.conf.arg(name=names[-1], aliases=[_flag(name) for name in names[:-1]], **texts),
    ]


def _dictionary(entries: dict[str, Any], name: str = "", meaning: str | None = None) -> Any:
    """A type that tyro fills with the given settings alone, without defaults."""
    make: Any = TypedDict
    kind = make(name, entries, total=False)
    kind.__doc__ = meaning
    return kind


def help_view(command: type, defaults: Any = None, short: bool = False) -> Any:
    """A type for the help text: groups of settings with their descriptions and defaults.

    With ``short`` it has the main settings alone.
    """
    entries: dict[str, Any] = {}
    notes = meanings(command)
    for f in in_order(command):
        if isinstance(f.type, type) and is_dataclass(f.type):
            assert f.default_factory is not MISSING
            if not short or _has_short_help(f.type):
                entries[f.name] = help_view(f.type, f.default_factory(), short)
        elif not short or about(f).main:
            default = f.default if defaults is None else getattr(defaults, f.name)
            hint = _hint(f, default)
            entries[f.name] = _entry(
                f, help=about(f).meaning or notes[f.name], help_behavior_hint=hint
            )
    return _dictionary(entries, command.__name__, command.__doc__)


def _hint(f: Field[Any], default: Any) -> str:
    if default is MISSING:
        return "(required)"
    text = " ".join(default) if isinstance(default, tuple) else str(default)
    # A command's own default also holds for its Gymnasium tasks.
    gym = about(f).defaults.get("gym") if default == f.default else None
    defaults = [] if gym is None else [f"with --gym: {gym}"]
    return f"(default: {'; '.join([text, *defaults])})"


def _by_tyro(entries: dict[str, Any], words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings that tyro finds in words, and the unparsed words: all if tyro rejects them."""
    if not words:
        return {}, words
    try:
        with redirect_stderr(StringIO()):
            settings, tail = tyro.cli(
                _dictionary(entries),
                args=words,
                add_help=False,
                console_outputs=False,
                return_unknown_args=True,
            )
    except SystemExit:
        return {}, words
    return dict(settings), tail


def _parts(words: list[str]) -> list[list[str]]:
    """The words before the first flag, then each flag with the words after it."""
    end = words.index("--") if "--" in words else len(words)
    begins = [i for i, word in enumerate(words[:end]) if _FLAG.match(word)]
    return [words[a:b] for a, b in pairwise([0, *begins, len(words)])]


def _alone(command: type, program: str, words: list[str]) -> dict[str, Any]:
    """The settings given by one flag and the words after it, or by words without a flag."""
    fields = settings_of(command)
    positional = {name: _entry(f) for name, f in fields.items() if about(f).positional}
    if not words or not _FLAG.match(words[0]):
        settings, tail = _by_tyro(positional, words)
        if words and (tail or not settings):
            takes = "".join(f"one {name}, not" for name in settings) or "no"
            raise UsageError(f"{program}: takes {takes} {shown((tail or words)[0])}; see --help")
        return settings
    flag, equals, text = words[0].partition("=")
    name = _setting_of(command, program, flag)
    flag = flag if flag.startswith("--") else _flag(name)
    kind = fields[name].type
    values = [text] * bool(equals) + words[1:]
    if bool in options_of(kind) and NoneType in options_of(kind) and values == ["None"]:
        return {name: None}
    # Joined by =, a value that looks like a flag is parsed as a value.
    words = words if len(values) != 1 else [f"{flag}={values[0]}"]
    settings, tail = _by_tyro(positional | {name: _entry(fields[name])}, words)
    if tail and bool in options_of(kind):
        raise UsageError(f"{flag}: takes no value, got {shown(values[0])}; write {flag} alone")
    if tail or settings[name] == ():
        got = shown(values[0]) if len(values) == 1 else " ".join(values) or "nothing"
        takes = description(kind).replace("null", "None")
        raise UsageError(f"{flag}: must be {takes}, got {got}")
    return settings


def _setting_of(command: type, program: str, flag: str) -> str:
    """The setting that a flag names; ``--no-NAME`` also names a switch.

    Raises:
        UsageError: there is no such setting; the message suggests the nearest.
    """
    names = spellings(command)
    word = flag.removeprefix("-").removeprefix("-").replace("-", "_")
    if word in names:
        return names[word]
    switch = names.get(word.removeprefix("no_"))
    if switch is not None and bool in options_of(settings_of(command)[switch].type):
        return switch
    former = FLAGS.get(word.replace("_", "-"))
    if former is not None:
        raise UsageError(f"{flag}: a flag of the prior system; {former}")
    hint = suggestion(word, names, f"{program} {help_flag(command)} lists all settings", show=_flag)
    raise UsageError(f"{flag}: {program} has no such setting; {hint}")


def _flag(name: str) -> str:
    return f"-{name}" if len(name) == 1 else "--" + name.replace("_", "-")
