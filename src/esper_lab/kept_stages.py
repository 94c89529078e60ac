"""Stages of an evaluation: what was played once is kept in a file and not played again."""

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from esper.leyline.disk import read_sealed, replace_sealed
from esper.leyline.errors import UsageError
from esper_lab.play import Outcome, Population

RESULTS_VERSION = 3
"""Raise it when training, measuring or a rule changes results: what was played before then no
longer counts."""

OnBatch = Callable[[str, int, int], None]
"""Called with a stage, the episodes of a finished batch, and all episodes of the stage."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of an evaluation.

    Attributes:
        work: directory in which finished stages are kept.
        on_batch: see ``OnBatch``.
    """

    work: Path
    on_batch: OnBatch

    def load_or_play(
        self,
        name: str,
        population: Population,
        members: Sequence[object],
        make: Callable[[Callable[[int], None]], Outcome],
    ) -> Outcome:
        """The outcome of a stage, played by ``make`` unless it has been played before.

        Args:
            name: name of the stage.
            population: its hosts; all settings of their tasks count.
            members: what is played on every host. Another stage of the same size, of other hosts
                or other members, is not taken for this one.
            make: plays the stage; it calls its argument with the episodes of every finished batch.

        Raises:
            UsageError: the stored outcome cannot be read.
        """
        hosts = len(population.tasks)
        key = digest(hosts_of(population), members)
        path = self.work / f"{name.replace(' ', '-')}-{hosts}-hosts-{key}.npz"

        def done(episodes: int) -> None:
            self.on_batch(name, episodes, hosts * len(members))

        return load_or_make(path, lambda: make(done))


def load_or_make(path: Path, make: Callable[[], Outcome]) -> Outcome:
    """The outcome stored at ``path``; made and stored there if there is none.

    Raises:
        UsageError: the file cannot be read or written.
    """
    if not path.exists():
        outcome = make()
        buffer = io.BytesIO()
        arrays = {name: getattr(outcome, name).astype(np.float32) for name in Outcome.__slots__}
        np.savez_compressed(buffer, **arrays)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_sealed(path, buffer.getvalue())
        except OSError as error:
            raise UsageError(f"work: cannot write {path} ({error.strerror})") from error
    try:
        with np.load(io.BytesIO(read_sealed(path))) as file:
            return Outcome(**{name: file[name].astype(float) for name in Outcome.__slots__})
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"work: cannot read {path} ({error}); remove the file") from error


def hosts_of(population: Population) -> tuple[object, ...]:
    """What determines the hosts of a population and their data, but not how they are computed."""
    return population.tasks, population.first, population.seed, population.data_seed


def digest(*parts: object) -> str:
    """Digest of ``parts``, see ``description``, and of ``RESULTS_VERSION``."""
    return hashlib.sha256(repr((RESULTS_VERSION, description(parts))).encode()).hexdigest()[:12]


def description(value: Any) -> object:
    """A value as nested tuples of text, the same in every process.

    Functions count by name and by the values that they are bound to, not by their code; of a lambda
    the constants count as well.
    """
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__qualname__
        names = {field.name: FORMER_FIELDS.get((kind, field.name)) for field in fields(value)}
        return (kind, description({old or new: getattr(value, new) for new, old in names.items()}))
    if isinstance(value, partial):
        return ("partial", description((value.func, value.args, value.keywords)))
    if isinstance(value, dict):
        return tuple((repr(key), description(part)) for key, part in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(description, value))
    if isinstance(value, FunctionType):
        values = [cell.cell_contents for cell in value.__closure__ or ()]
        values = [part for part in values if part is not value]
        code = value.__code__
        if value.__name__ == "<lambda>":
            values += [code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")]]
        return (_name(value), description((value.__defaults__, value.__kwdefaults__, values)))
    if isinstance(value, MethodType):
        return (_name(value), description(value.__self__))
    if hasattr(value, "__qualname__"):
        return _name(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


FORMER_MODULES = {
    "esper_lab.mnist1d": "esper.runtime.mnist1d",
    "esper_lab.shifts": "esper.runtime.shifts",
}
FORMER_FIELDS = {("Task", "price"): "rent"}
"""Former names, by which the keys of kept stages and shipped controls know modules and fields."""


def _name(value: Any) -> str:
    return f"{FORMER_MODULES.get(value.__module__, value.__module__)}.{value.__qualname__}"
