"""Plugins: Python files of the user that register tasks and blueprints when they are run."""

import hashlib
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from esper.kasmina.blueprints import BUILDERS
from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS
from esper.leyline.config import TrainConfig
from esper.leyline.errors import UsageError
from esper.runtime.encoders import ENCODERS
from esper.runtime.gate import Permission
from esper.runtime.paths import absolute_path
from esper.runtime.tasks import FAMILIES, SUITES, TASKS

_modules: dict[Path, ModuleType] = {}
"""Files that this process has run, or others that stand for them, and their modules."""


def load_all(config: TrainConfig, permission: Permission, source: str) -> None:
    """Run the plugins, and import the module of the Gymnasium id, that settings name.

    Args:
        config: the settings.
        permission: see ``load``.
        source: where the settings come from, for messages.

    Raises:
        UsageError: see ``load``; or the module is not permitted, or fails.
    """
    gym = config.gymnasium.gym
    missing = [path for path in config.world.plugin if _key(path) not in _modules]
    permission.check(missing, None if is_imported(gym) else gym, source)
    for path in missing:
        load(path, permission, source)
    if gym is not None and not is_imported(gym):
        try:
            import_module(gym.partition(":")[0])
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(f"gym: {gym} cannot be created ({reason})") from error


def is_imported(gym: str | None) -> bool:
    """Whether the module that a Gymnasium id names is imported; true of an id without one."""
    return gym is None or ":" not in gym or gym.partition(":")[0] in sys.modules


def load(path: str, permission: Permission, source: str = "the command") -> None:
    """Run the Python file at ``path``; each file runs once per process, whatever path names it.

    Args:
        path: the file; ``Permission.file`` says which one stands for it.
        permission: what may run; a file that this process has run needs none.
        source: what names the file, for messages.

    Raises:
        UsageError: it is not permitted, there is no such Python file, or it failed; names the
            failing line.
    """
    if _key(path) not in _modules:
        file = permission.file(path, source)
        _run(file)
        _modules[_key(path)] = _modules[_key(file)]


def file_of(path: str) -> str:
    """The file that this process has run as the plugin ``path``; ``path`` itself if none."""
    module = _modules.get(_key(path))
    return path if module is None else str(module.__file__)


def _key(path: str) -> Path:
    try:
        return Path(absolute_path(path))
    except ValueError:  # a null byte, which no file has
        return Path(path)


def _run(path: str) -> None:
    """Run a file that is permitted, unless it has been."""
    try:
        file = Path(absolute_path(path))
        if file in _modules:
            return
        if file.suffix != ".py":
            raise UsageError(f"plugin: {path} is not a Python file; give one that ends in .py")
        source = file.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"plugin: cannot read {path!r} ({reason}); give a Python file") from error
    module = ModuleType(f"esper_plugin_{file.stem}_{_digest(file)}", f"Plugin {file}.")
    module.__file__ = str(file)
    before = _registry()
    # dataclasses and pickle look up the module of a class by name.
    sys.modules[module.__name__] = module
    try:
        # Not by importlib, which would write a cache next to the user's file.
        exec(compile(source, str(file), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        # Remove what it registered, so that the file can be loaded again once it is fixed.
        _restore(before)
        raise UsageError(f"plugin: {_line_of(path, file, error)}: {_text_of(error)}") from error
    _modules[file] = module


def module(path: str, permission: Permission) -> ModuleType:
    """The module of the Python file at ``path``, which is run if it has not been.

    Raises:
        UsageError: see ``load``.
    """
    load(path, permission)
    return _modules[_key(path)]


def digest(path: str) -> str:
    """The SHA-256 of the file at ``path`` in hexadecimal, or ``missing``."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "missing"


_REGISTERS: tuple[dict[str, Any], ...] = (TASKS, SUITES, FAMILIES, BUILDERS, HEAD_WIDTHS, ENCODERS)


def _registry() -> tuple[list[str], list[dict[str, Any]]]:
    return list(BLUEPRINTS), [dict(register) for register in _REGISTERS]


def _restore(before: tuple[list[str], list[dict[str, Any]]]) -> None:
    names, registers = before
    BLUEPRINTS[:] = names
    for register, entries in zip(_REGISTERS, registers, strict=True):
        register.clear()
        register.update(entries)


def _digest(file: Path) -> str:
    return hashlib.sha256(os.fsencode(file)).hexdigest()[:12]


def _line_of(path: str, file: Path, error: BaseException) -> str:
    """``path`` and, if known, the line of the file at which the error occurred."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(file)
    ]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    return f"{path}, line {lines[-1]}" if lines else path


def _text_of(error: BaseException) -> str:
    """The error on one line."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(message.split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"
