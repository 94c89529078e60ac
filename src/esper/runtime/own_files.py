"""A Python file of the user's own that builds a model and its loaders."""

import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.leyline.errors import UsageError, first_line, suggestion
from esper.runtime import plugins
from esper.runtime.gate import Permission
from esper.runtime.paths import absolute_path

MODEL, LOADERS, RECIPE = "model", "loaders", "recipe"
"""What Esper looks for in a file if no name is given."""
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Loaders:
    """Loaders of the three splits; ``test`` is None without one."""

    train: Any
    validation: Any
    test: Any


@dataclass(frozen=True, slots=True)
class OwnFile:
    """What a user's file holds.

    Attributes:
        name: name of the file without its ending.
        model: as the user wrote it, ``FILE:NAME``.
        data: likewise, of the loaders.
        sha256: checksums of the files, by the setting that names them.
    """

    name: str
    model: str
    data: str
    sha256: dict[str, str]
    _model: Callable[[], Any]
    _loaders: Callable[[], Any]
    _recipe: Callable[[int], Any] | None

    def build(self) -> nn.Module:
        """A newly built module.

        Raises:
            UsageError: the function fails, or returns something else.
        """
        module = _result("model", self.model, self._model)
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"model: {self.model} returns a {type(module).__name__}; return an nn.Module"
            )
        return module

    def loaders(self) -> Loaders:
        """Newly made loaders.

        Raises:
            UsageError: the function fails, or returns something else.
        """
        loaders = _result("data", self.data, self._loaders)
        if isinstance(loaders, Mapping):
            loaders = [loaders[split] for split in SPLITS if split in loaders]
        if not isinstance(loaders, tuple | list) or len(loaders) not in (2, 3):
            raise UsageError(
                f"data: {self.data} must return the loaders (train, validation) or "
                f"(train, validation, test), got a {type(loaders).__name__}"
            )
        return Loaders(loaders[0], loaders[1], loaders[2] if len(loaders) == 3 else None)

    def describe(self, error: BaseException) -> str:
        """An error on one line, with the line of the user's file at which it arose, if it did."""
        files = {absolute_path(each.rpartition(":")[0]) for each in (self.model, self.data)}
        lines = [
            f"{os.path.basename(frame.filename)}, line {frame.lineno}: "
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename in files
        ]
        reason = (str(error).strip() or "no message").splitlines()[0]
        return f"{lines[-1] if lines else ''}{type(error).__name__}: {reason}"

    def recipe(self, epochs: int) -> dict[str, Any]:
        """Further arguments of ``esper.grow``; empty if the file has no ``recipe``.

        Raises:
            UsageError: the function fails, or returns something else than a dict.
        """
        if self._recipe is None:
            return {}
        arguments = _result("recipe", f"{RECIPE}({epochs})", partial(self._recipe, epochs))
        if not isinstance(arguments, dict):
            raise UsageError(
                f"recipe: it returns a {type(arguments).__name__}; return a dict of arguments of "
                "esper.grow"
            )
        return arguments


def files_of(model: str, data: str | None = None) -> tuple[str, ...]:
    """The files that ``FILE:NAME`` of a model and of its loaders name, for ``find_own``."""
    return tuple(_split(text, "")[0] for text in (model, data) if text is not None)


def find_own(model: str, data: str | None, permission: Permission) -> OwnFile:
    """The model and the loaders of ``FILE:NAME``, of a user's own files.

    Args:
        model: a function without arguments, or a class, that makes the module; ``model`` without a
            name.
        data: a function that returns the loaders of training, validation and, if there is one,
            test; ``loaders`` of the same file if None or without a name.
        permission: must permit both files, see ``files_of``.

    Raises:
        UsageError: there is no such file or function, or the file fails.
    """
    file, name = _split(model, MODEL)
    module = _module("model", file, permission)
    builds = _function("model", file, module, name)
    data_file, data_name = _split(file if data is None else data, LOADERS)
    data_module = _module("data", data_file, permission)
    recipe = getattr(module, RECIPE, None)
    return OwnFile(
        Path(file).stem,
        f"{file}:{name}",
        f"{data_file}:{data_name}",
        {"model": plugins.digest(file), "data": plugins.digest(data_file)},
        builds,
        _function("data", data_file, data_module, data_name),
        recipe if callable(recipe) else None,
    )


def names_function(text: str) -> bool:
    """Whether ``given`` is ``FILE:NAME`` and not a file alone."""
    return _split(text, "") != (text, "")


def set_seed(seed: int) -> None:
    """Seed torch, numpy and python, so that a file builds the same model and loaders again."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _split(text: str, default: str) -> tuple[str, str]:
    file, colon, name = text.rpartition(":")
    return (file, name) if colon and name.isidentifier() else (text, default)


def _module(setting: str, file: str, permission: Permission) -> ModuleType:
    """The module of a file, which may import its neighbours as under ``python FILE``."""
    folder = os.path.dirname(absolute_path(file))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return plugins.module(file, permission)
    except UsageError as error:
        raise UsageError(str(error).replace("plugin:", f"{setting}:", 1)) from error


def _function(setting: str, file: str, module: ModuleType, name: str) -> Callable[[], Any]:
    value = getattr(module, name, None)
    if callable(value):
        return value
    names = [
        each
        for each, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    hint = suggestion(name, names, f"write a function {name}, or name one: {file}:NAME")
    raise UsageError(f"{setting}: {file} has no function {name!r}; {hint}")


def _result(setting: str, what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except UsageError:
        raise
    except Exception as error:
        reason = first_line(error)
        hint = "" if setting == RECIPE else "; it is called without arguments"
        raise UsageError(
            f"{setting}: {what} fails ({type(error).__name__}: {reason}){hint}"
        ) from error
