"""Plays policies on a population of hosts, each on the same hosts, and keeps what was played."""

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.hosts.host import Host
from esper.kasmina.transfer import CPU
from esper.leyline.disk import read_sealed, replace_sealed
from esper.leyline.errors import UsageError
from esper.runtime.tasks import Task
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig, Step
from esper.tamiyo.baselines import Actor
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.backends import Backend
from esper.tolaria.precision import Precision
from esper_lab.plans import NEVER, POSITIONS, Plan, schedule, slot_at

Floats = NDArray[np.float64]
ROWS = 512
"""Environments per batch of hosts; more would not fit into the cache."""


@dataclass(frozen=True, slots=True)
class Population:
    """Hosts to play on.

    Attributes:
        tasks: the task of each host; hosts that are played together must agree in their horizon.
        first: identity of the first host; identities determine initial weights and data order.
        seed: root seed.
        data_seed: seed of the data order, see ``GrowthConfig``.
        threads: CPU threads.
    """

    tasks: tuple[Task, ...]
    first: int = 0
    seed: int = 1
    data_seed: int | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of an evaluation.

    Attributes:
        training: hosts on which rules are tuned.
        fresh: hosts on which everything is scored.
    """

    training: Population
    fresh: Population


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of growth, see ``GrowthConfig``.

    Attributes:
        one_at_a_time: whether a seed may germinate only while no other seed develops.
        strict_gates: whether seeds must also show an improvement to advance.
        max_seeds: limit of living seeds per environment; that of the task if None.
    """

    one_at_a_time: bool = True
    strict_gates: bool = False
    max_seeds: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcomes at the last step of H hosts under M members, ``[H, M]`` each.

    Scores are expected accuracies of the committed hosts, in [0, 1]; utility is score minus price.

    Attributes:
        test_utility, validation_utility: utility with the score of either split.
        test_score, validation_score: expected accuracy.
        test_accuracy: share of correct predictions.
        added: parameters of the fossilised seeds.
        features: what the first member observed in each step, ``[H, T, F]``: host features, then
            the slot features at each of ``plans.PLACES``, whatever the number of slots.
    """

    test_utility: Floats
    validation_utility: Floats
    test_score: Floats
    validation_score: Floats
    test_accuracy: Floats
    added: Floats
    features: Floats

    @classmethod
    def join(cls, parts: Sequence["Outcome"], axis: int) -> "Outcome":
        """The outcomes of further hosts (axis 0), or of further members (axis 1)."""
        names = [name for name in cls.__slots__ if axis == 0 or name != "features"]
        outcome = {name: np.concatenate([getattr(p, name) for p in parts], axis) for name in names}
        return cls(**({"features": parts[0].features} | outcome))

    def members(self, indices: slice | NDArray[np.int_]) -> "Outcome":
        """The outcomes of some members, with the features as they are."""
        names = [name for name in self.__slots__ if name != "features"]
        return replace(self, **{name: getattr(self, name)[:, indices] for name in names})


def play_plans(
    population: Population,
    plans: tuple[Plan, ...],
    on_batch: Callable[[int], None] = lambda episodes: None,
) -> Outcome:
    """Play every plan on every host; member m is plan m, and the first plan must be ``NEVER``.

    Arguments as for ``play``.

    Raises:
        ValueError: the first plan is another.
    """
    if plans[0] is not NEVER:
        raise ValueError("the first plan must be NEVER, whose features are recorded")
    in_turn = [i for i, plan in enumerate(plans) if not plan.at_once]
    at_once = [i for i, plan in enumerate(plans) if plan.at_once]
    parts = []
    for indices in filter(None, (in_turn, at_once)):
        group = tuple(plans[i] for i in indices)

        def actor(env: GrowthEnv, group: tuple[Plan, ...] = group) -> Actor:
            rows = [schedule(group, task) for task in tasks_of_groups(env)]
            return ScheduleActor(Schedule.concatenate(rows))

        rules = Rules(one_at_a_time=indices is in_turn)
        parts.append(play(population, actor, len(group), rules, on_batch))
    return Outcome.join(parts, axis=1).members(np.argsort([*in_turn, *at_once]))


def play(
    population: Population,
    actor: Callable[[GrowthEnv], Actor],
    members: int,
    rules: Rules = Rules(),
    on_batch: Callable[[int], None] = lambda episodes: None,
    trained_by: Callable[[Host, Backend], Backend] | None = None,
) -> Outcome:
    """Play a policy on every host.

    Hosts are played in batches of at most ``ROWS`` environments and of nearly equal size.

    Args:
        population: the hosts.
        actor: makes the actor of an environment of consecutive hosts.
        members: environments per host; they differ in seeds' weights and the policy's draws.
        rules: rules of growth.
        on_batch: called with the number of episodes of every finished batch.
        trained_by: makes the backend of the episodes of the one that the environment has.
    """
    outcomes = []
    hosts = len(population.tasks)
    batches = -(-hosts // max(1, ROWS // members))
    ends = [hosts * batch // batches for batch in range(batches + 1)]
    for begin, end in pairwise(ends):
        tasks = population.tasks[begin:end]
        outcomes.append(_batch(population, begin, tasks, actor, members, rules, trained_by))
        on_batch(len(tasks) * members)
    return Outcome.join(outcomes, axis=0)


def _batch(
    population: Population,
    begin: int,
    tasks: tuple[Task, ...],
    actor: Callable[[GrowthEnv], Actor],
    members: int,
    rules: Rules,
    trained_by: Callable[[Host, Backend], Backend] | None,
) -> Outcome:
    different = tuple(dict.fromkeys(tasks))
    config = GrowthConfig(
        seed=population.seed, data_seed=population.data_seed, group_size=members,
        episode_length=tasks[0].episode_length, max_batches=tasks[0].max_batches,
        batch_size=tasks[0].batch_size, max_seeds=rules.max_seeds or tasks[0].max_seeds,
        strict_gates=rules.strict_gates, one_at_a_time=rules.one_at_a_time,
        threads=population.threads,
    )  # fmt: skip
    first = (population.first + begin) * members
    identities = torch.arange(first, first + len(tasks) * members)
    assignment = torch.tensor([different.index(task) for task in tasks]).repeat_interleave(members)
    env = GrowthEnv(different, identities, config, Precision("cpu"), CPU, assignment=assignment)
    if trained_by is not None:
        env.backends = {key: trained_by(key[0].host, b) for key, b in env.backends.items()}
    last: list[Step] = []

    def keep(t: int, actions: torch.Tensor, step: Step) -> None:
        last[:] = [step]

    rollout = collect(env, actor(env), 0, keep)
    report = last[0].report
    assert report.test is not None
    host, slots = (
        part[:, ::members] for part in (rollout.observation.host, rollout.observation.slots)
    )
    counts = [len(task.host.slots) for task in tasks]
    indices = torch.tensor([[slot_at(p, count) for p in POSITIONS.values()] for count in counts])
    group = slots[:, torch.arange(len(tasks))[:, None], indices]
    features = torch.cat([host, group.flatten(2)], 2).transpose(0, 1)

    def table(values: torch.Tensor) -> Floats:
        return values.double().view(len(tasks), members).numpy()

    return Outcome(
        test_utility=table(env.utility(report.test.expected, report.added_parameters)),
        validation_utility=table(env.utility(report.score, report.added_parameters)),
        test_score=table(report.test.expected), validation_score=table(report.score),
        test_accuracy=table(report.test.accuracy), added=table(report.added_parameters),
        features=features.double().numpy(),
    )  # fmt: skip


def tasks_of_groups(env: GrowthEnv) -> list[Task]:
    """The task of each group of an environment with assigned tasks."""
    assert env.assignment is not None
    return [env.tasks[index] for index in env.assignment[:: env.config.group_size].tolist()]


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
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return (kind, description(parts))
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
    if isinstance(value, float):
        return f"{value:.12g}"  # processors differ in the last digits of a drawn number
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
