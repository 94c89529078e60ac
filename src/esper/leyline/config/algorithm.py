"""The registry of the algorithms by which a policy learns.

Each is one module, of ``esper.simic.algorithms`` or of an installed package that names it as an
entry point of the group ``esper.algorithms``. It registers the algorithm when it is imported.
Commands, help, settings, checks and runs derive from what is registered here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from esper.leyline.config.setting import settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from esper.leyline.config.groups import LearnerConfig, TrainConfig

HOME = "esper.simic.algorithms"
"""The package of the algorithms. Its modules import torch only when a run is made."""
GROUP = "esper.algorithms"
"""Group of the entry points by which other packages name theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """The settings that one algorithm has, and what it does otherwise than PPO."""

    def check(self, config: "TrainConfig") -> None:
        """Refuse settings of a run, ``config``, that contradict each other.

        Raises:
            UsageError: names the field, its value and the fix.
        """

    def check_resumed(self, before: Any) -> None:
        """Refuse to go on with a run that had the settings ``before`` of this class.

        Raises:
            UsageError: names the field and the fix.
        """

    def resolved(self) -> dict[str, Any]:
        """Settings whose default depends on other settings, with the values in effect."""
        return {}

    def learner_arguments(self, learner: "LearnerConfig") -> dict[str, Any]:
        """Arguments of ``PPOAgent`` besides those that every learner has: what makes it another.

        They are ``estimator`` and ``older``.
        """
        return {}

    def trainee(
        self, config: "TrainConfig", device: Any, resume: "Path | None", check: Callable[[], None]
    ) -> Any:
        """A ``Trainee`` whose environments are elsewhere; None if they are in this process.

        Args:
            config: settings of the run.
            device: device of the learner.
            resume: the run that the trainee's state is restored from next; None for a new run.
            check: called while waiting; may raise.
        """
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """One way to learn.

    Attributes:
        name: that of the command ``esper train NAME`` and of the setting ``algorithm``.
        title: its name in messages.
        summary: its line in the list of commands.
        description: the beginning of the command's help.
        settings: class of its settings: those besides the common ones, or all of an algorithm that
            learns from records.
        defaults: defaults of common settings that differ from those of PPO.
        from_records: whether it learns from records of other runs, and does not act.
    """

    name: str
    title: str
    summary: str
    description: str
    settings: type[Any] = AlgorithmConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)
    from_records: bool = False

    @property
    def group(self) -> type[AlgorithmConfig]:
        """Class of ``TrainConfig.algorithm`` in its runs."""
        kind: type[AlgorithmConfig] = self.settings
        return AlgorithmConfig if self.from_records else kind


_ALGORITHMS: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> None:
    """Add an algorithm; from then on ``esper train`` has it.

    Its settings must not have the names of others.
    """
    assert algorithm.name not in _ALGORITHMS, algorithm.name
    _ALGORITHMS[algorithm.name] = algorithm


def unregister(name: str) -> None:
    """Remove an algorithm that ``register`` added."""
    del _ALGORITHMS[name]


@cache
def _import_algorithms() -> None:
    for module in iter_modules(import_module(HOME).__path__):
        import_module(f"{HOME}.{module.name}")
    for point in entry_points(group=GROUP):
        point.load()


def algorithms() -> Mapping[str, Algorithm]:
    """All algorithms by name: those that act, then those that learn from records."""
    _import_algorithms()
    by_kind = sorted(_ALGORITHMS.values(), key=lambda one: (one.from_records, one.name != "ppo"))
    return {one.name: one for one in by_kind}


def learns_by_acting(policy: str) -> bool:
    """Whether a policy, by the name that events give it, learns while it acts."""
    return policy in algorithms() and not algorithms()[policy].from_records


def algorithm_with(settings: type) -> Algorithm:
    """The algorithm that learns from records and has settings of this class."""
    (match,) = (one for one in algorithms().values() if one.settings is settings)
    return match


def owner_of(setting: str) -> Algorithm | None:
    """The algorithm that acts and has a setting of this name, None for a common setting."""
    owners = (one for one in algorithms().values() if setting in settings_of(one.group))
    return next(owners, None)
