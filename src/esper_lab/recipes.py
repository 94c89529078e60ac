"""Training recipes that were tuned for each task's host and for a wider static network."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from esper.runtime.task import Task

TABLE = Path(__file__).with_name("recipes.json")
"""The table of ``benchmarks/recipes.py``, shipped with the package."""


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a network is trained; the attributes are those of ``Task``."""

    learning_rate: float
    decay: str = "constant"
    max_gradient_norm: float = 1.0
    weight_decay: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.learning_rate:g} {self.decay}"]
        if self.max_gradient_norm != 1.0:
            parts.append(f"clip {self.max_gradient_norm:g}")
        if self.weight_decay:
            parts.append(f"weight decay {self.weight_decay:g}")
        return ", ".join(parts)

    @classmethod
    def of(cls, task: Task) -> "Recipe":
        """The recipe with which ``task`` trains its host."""
        return cls(**{name: getattr(task, name) for name in cls.__struct_fields__})

    def on(self, task: Task) -> Task:
        """``task`` trained by this recipe."""
        return replace(task, **msgspec.structs.asdict(self))


class TunedRecipes(msgspec.Struct, frozen=True):
    """The tuned recipes of a task.

    Attributes:
        host: best for its host, which never grows.
        static: best for the static network.
        shared: loses least against both; the recipe of the task.
        static_parameters: size of the static network.
    """

    host: Recipe
    static: Recipe
    shared: Recipe
    static_parameters: int


@cache
def read_tuned(table: Path = TABLE) -> dict[str, TunedRecipes]:
    """The tuned recipes by name of the task; tasks that were not tuned are absent.

    Raises:
        OSError: there is no such file.
        msgspec.ValidationError: the file does not have the format of the benchmark.
    """
    return msgspec.json.decode(table.read_bytes(), type=dict[str, TunedRecipes])
