"""Everything one can set about a run: frozen dataclasses that command line and JSON derive from."""

from esper.leyline.config.groups import (
    GymConfig,
    LearnerConfig,
    MachineConfig,
    OutputConfig,
    TrainConfig,
    WorldConfig,
)
from esper.leyline.config.names import ALIASES, canonical_name, setting_kinds, setting_names
from esper.leyline.config.ranges import check
from esper.leyline.config.reading import (
    GROWTH_ONLY,
    GYM_DEFAULTS,
    GYM_ONLY,
    canonical,
    flatten,
    unflatten,
)
from esper.leyline.config.values import described, options_of, shown

__all__ = [
    "ALIASES",
    "GROWTH_ONLY",
    "GYM_DEFAULTS",
    "GYM_ONLY",
    "GymConfig",
    "LearnerConfig",
    "MachineConfig",
    "OutputConfig",
    "TrainConfig",
    "WorldConfig",
    "canonical",
    "canonical_name",
    "check",
    "described",
    "flatten",
    "options_of",
    "setting_kinds",
    "setting_names",
    "shown",
    "unflatten",
]
