"""The settings of a run: frozen dataclasses that define the command line and ``config.json``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.leyline.config.groups import (
        EpisodeRules,
        GymConfig,
        LearnerConfig,
        MachineConfig,
        MethodConfig,
        OutputConfig,
        TrainConfig,
        WorldConfig,
    )
    from esper.leyline.config.reading import canonical, check, defaults_of, flatten, unflatten
    from esper.leyline.config.setting import shown

__all__ = [
    "EpisodeRules",
    "GymConfig",
    "LearnerConfig",
    "MachineConfig",
    "MethodConfig",
    "OutputConfig",
    "TrainConfig",
    "WorldConfig",
    "canonical",
    "check",
    "defaults_of",
    "flatten",
    "shown",
    "unflatten",
]


def __getattr__(name: str) -> Any:
    """A setting's group or function, imported when it is used: growing needs the fields alone."""
    if name not in __all__:
        raise AttributeError(f"module 'esper.leyline.config' has no attribute {name!r}")
    for home in ("setting", "groups", "reading"):
        module = import_module(f"esper.leyline.config.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AssertionError(name)
