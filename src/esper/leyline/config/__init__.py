"""The settings of a run: frozen dataclasses that define the command line and ``config.json``."""

from esper.leyline.config.groups import (
    ALGORITHMS,
    Algorithm,
    GymConfig,
    ImpalaConfig,
    LearnerConfig,
    MachineConfig,
    MethodConfig,
    OutputConfig,
    TrainConfig,
    WorldConfig,
    impala_of,
    lag_of,
)
from esper.leyline.config.ranges import check
from esper.leyline.config.reading import canonical, defaults_of, flatten, unflatten
from esper.leyline.config.values import shown

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "GymConfig",
    "ImpalaConfig",
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
    "impala_of",
    "lag_of",
    "shown",
    "unflatten",
]
