"""Esper trains neural networks that grow while they train.

All N environments (each one a host network in mid-training) are one tensor program; a recurrent
policy, itself trained by PPO, decides at every step what should grow where. ``grow`` and ``Growth``
grow a module of the user's own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.kasmina.shrinking import shrink_and_perturb
    from esper.leyline.errors import UsageError
    from esper.own_models import (
        Enlargement,
        EpochRecord,
        Growth,
        GrowthResult,
        Slot,
        Validation,
        check,
        deepen,
        grow,
        load_grown,
        strip,
        widen,
    )
    from esper.simic.gym.registration import register_envs
    from esper.simic.tools.gym_policy import load_policy

__version__ = "0.1.0"

__all__ = [
    "Enlargement",
    "EpochRecord",
    "Growth",
    "GrowthResult",
    "Slot",
    "UsageError",
    "Validation",
    "__version__",
    "check",
    "deepen",
    "grow",
    "load_grown",
    "load_policy",
    "register_envs",
    "shrink_and_perturb",
    "strip",
    "widen",
]

_HOMES = {
    "UsageError": "esper.leyline.errors",
    "load_policy": "esper.simic.tools.gym_policy",
    "register_envs": "esper.simic.gym.registration",
    "shrink_and_perturb": "esper.kasmina.shrinking",
}
"""Modules of the names that are not of ``esper.own_models``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'esper' has no attribute {name!r}{_namesake(name)}")
    # Imported when it is first used: torch takes seconds.
    value = getattr(import_module(_HOMES.get(name, "esper.own_models")), name)
    globals()[name] = value
    return value


def _namesake(name: str) -> str:
    """What to add if the package that was meant may be the one named ``esper`` on PyPI."""
    from esper_growth import namesake_is_installed

    # Python itself asks for special names that are missing, often.
    if name.startswith("__") or not namesake_is_installed():
        return ""
    return (
        "; this is Esper, of esper-growth, which shares its import name with the installed "
        "package esper (an entity component system): give each an environment of its own"
    )


def __dir__() -> list[str]:
    return sorted(__all__)
