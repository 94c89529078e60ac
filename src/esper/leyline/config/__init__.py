"""The settings of a run: frozen dataclasses that define the command line and ``config.json``."""

from esper.leyline.config.groups import (
    GymConfig,
    LearnerConfig,
    MachineConfig,
    MethodConfig,
    OutputConfig,
    TrainConfig,
    WorldConfig,
)
from esper.leyline.config.ranges import check
from esper.leyline.config.reading import canonical, defaults_of, flatten, unflatten
from esper.leyline.config.values import shown

__all__ = [
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
