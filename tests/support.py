"""Small hosts, gardens of seeds, random stacks: what the tests of kasmina and tolaria share.

A garden says what grows where: for each environment a dict from slot index to ``Plant``.
"""

import copy
import fcntl
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina.blueprints import BUILDERS
from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.kasmina.seeds import AlphaMode, SeedState
from esper.kasmina.slots import SlotSpec, initial_distribution_on
from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS, Style
from esper.leyline.stages import Stage
from esper.native.build import NoCompiler
from esper.native.library import library
from esper.runtime.data import Dataset
from esper.runtime.tasks import Task
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tolaria.backends import Backend, Minibatches, Optimisation
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows, trained_hosts
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision
from esper.tolaria.results import EpochResult
from esper.tolaria.stores import AdamState, Stack
from oracles.naive import (
    CONV_BRANCHES,
    MLP_BRANCHES,
    SEQUENCE_BRANCHES,
    NaiveEnvironment,
    NaiveSeed,
    naive_host,
)

CPU, FULL = torch.device("cpu"), Precision("cpu")
F64 = torch.float64
TOLERANCE = 1e-9
BLUEPRINT_NAMES = tuple(CONV_BRANCHES)
MLP_NAMES = tuple(MLP_BRANCHES)
SEQUENCE_NAMES = tuple(SEQUENCE_BRANCHES)


@dataclass(frozen=True)
class Plant:
    """A seed as a test wants it."""

    blueprint: str
    style: Style = Style.LINEAR_ADD
    stage: Stage = Stage.FOSSILISED
    alpha: float = 1.0
    frozen: bool = False


Garden = list[dict[int, Plant]]

LIVES: dict[str, dict] = {
    "training": {"stage": Stage.TRAINING, "alpha": 0.0},
    "about to blend": {"stage": Stage.BLENDING, "alpha": 0.0},
    "blending": {"stage": Stage.BLENDING, "alpha": 0.3},
    "on the way down": {"stage": Stage.BLENDING, "alpha": 0.6, "frozen": True},
    "holding": {"stage": Stage.HOLDING, "alpha": 1.0},
    "fossilised": {"stage": Stage.FOSSILISED, "alpha": 1.0},
}
"""Every situation in which a seed is computed."""

IDLE_STAGES = (Stage.DORMANT, Stage.GERMINATED, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
"""Stages in which a slot's row must stay as it is."""


def small_host(**changes) -> CnnHost:
    """Two blocks, one pool, three slots: r0c0, r1c0, r0c1."""
    settings = {"channels": (3, 5), "classes": 4, "image": (6, 6, 2), "pools": 1}
    return CnnHost(**(settings | changes))


def small_mlp(**changes) -> MlpHost:
    """Three blocks, three slots: r0c0, r0c1, r0c2."""
    settings = {"widths": (7, 5, 3), "classes": 4, "image": (3, 2, 2)}
    return MlpHost(**(settings | changes))


CNN_SLOTS = ("r0c0", "r1c0", "wide0", "r0c1", "wide1")
SPANNED = (
    small_host(slot_names=CNN_SLOTS),
    small_host(pools=2, image=(7, 6, 2), slot_names=("wide0", "wide1")),
    small_host(channels=(3, 4, 5), pools=0, slot_names=("wide0", "wide1", "wide2")),
    small_host(kernel=1, channels=(3,), pools=1, slot_names=("wide0",)),
    small_mlp(widths=(4, 5), slot_names=("r0c0", "wide0", "r0c1", "wide1")),
    small_mlp(widths=(3,), slot_names=("wide0",)),
    small_mlp(slot_names=("wide0", "r0c1", "wide1", "wide2", "wide_all")),
)
"""Hosts with slots that span a layer."""


def small_gpt(**changes) -> TransformerHost:
    """Three layers, three slots: r0c0, r0c1, r0c2."""
    settings = {"layers": 3, "width": 4, "heads": 2, "context": 5, "classes": 7}
    return TransformerHost(**(settings | changes))


def names_of(host: Host) -> tuple[str, ...]:
    """The blueprints of the host's family, in the oracle's order."""
    if isinstance(host, TransformerHost):
        return SEQUENCE_NAMES
    return MLP_NAMES if isinstance(host, MlpHost) else BLUEPRINT_NAMES


def every_plant(names: tuple[str, ...] = BLUEPRINT_NAMES) -> list[Plant]:
    """Every blueprint in every style in every situation."""
    return [
        Plant(blueprint, style, **life)
        for blueprint, style, life in itertools.product(names, Style, LIVES.values())
    ]


def mixed_gardens(slots: int, rows: int, names: tuple[str, ...] = BLUEPRINT_NAMES) -> list[Garden]:
    """``every_plant`` dealt at random over environments and slots, with a few slots left empty."""
    plants: list[Plant | None] = [*every_plant(names)]
    plants += [None] * (len(plants) // 10)
    plants += [None] * (-len(plants) % (rows * slots))
    random.Random(5).shuffle(plants)
    environments = [
        {s: plant for s, plant in enumerate(plants[i : i + slots]) if plant is not None}
        for i in range(0, len(plants), slots)
    ]
    return [environments[i : i + rows] for i in range(0, len(environments), rows)]


def gardens_of(host: Host, rows: int) -> list[Garden]:
    """``every_plant`` that each slot accepts, dealt at random, with a tenth of the slots empty."""
    columns, longest = [], 0
    for slot in host.slots:
        plants: list[Plant | None] = [*every_plant(tuple(BLUEPRINTS[k] for k in slot.kinds))]
        plants += [None] * (len(plants) // 10)
        random.Random(slot.name).shuffle(plants)
        columns.append(itertools.cycle(plants))
        longest = max(longest, len(plants))
    count = -(-longest // rows) * rows
    environments = [
        {s: plant for s, plant in enumerate(plants) if plant is not None}
        for plants in itertools.islice(zip(*columns, strict=True), count)
    ]
    return [environments[i : i + rows] for i in range(0, count, rows)]


def seed_state(garden: Garden, slots: int) -> SeedState:
    """The struct of arrays that says what the garden says."""
    state = SeedState.dormant((len(garden), slots), CPU)
    for n, plants in enumerate(garden):
        for s, plant in plants.items():
            state.stage[n, s] = plant.stage
            state.blueprint[n, s] = BLUEPRINTS.index(plant.blueprint)
            state.style[n, s] = plant.style
            state.alpha[n, s] = plant.alpha
            if plant.frozen:
                state.ramp_mode[n, s] = AlphaMode.DOWN
    return state


def random_stack(host: Host, rows: int, dtype: torch.dtype = F64, seed: int = 0) -> Stack:
    """Parameters and statistics around those of birth, in every column; optimizers at 0."""
    generator = torch.Generator().manual_seed(seed)

    def filled(constant: Tensor) -> Tensor:
        noise = torch.rand(rows, len(constant), generator=generator, dtype=F64)
        return (constant + 0.8 * noise - 0.4).to(dtype)

    widths = [slot.width for slot in host.slots]
    stack = Stack.allocate(rows, host.layout.size, host.buffers.size, widths, dtype, CPU)
    stack.host.copy_(filled(host.layout.initial_distribution(host.layout.size)[0]))
    stack.buffers.copy_(filled(host.buffers.initial_distribution(host.buffers.size)[0]))
    for store, slot in zip(stack.seeds, host.slots, strict=True):
        store.copy_(filled(torch.zeros(slot.width, dtype=F64)))
    return stack


def random_batches(
    host: Host, rows: int, count: int = 5, size: int = 6, dtype: torch.dtype = F64, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Minibatches: images ``[B, H, W, N, C]`` and labels ``[N, B]``."""
    generator = torch.Generator().manual_seed(seed)
    height, width, channels = host.image
    shape = (size, height, width, rows, channels)
    return [
        (
            random_inputs(host, shape, generator).to(dtype),
            torch.randint(host.classes, (rows, size, *host.label_shape), generator=generator),
        )
        for _ in range(count)
    ]


def random_inputs(host: Host, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Images, or the bytes that a host takes."""
    if isinstance(host, TransformerHost):
        return torch.randint(host.classes, shape, generator=generator).to(F64)
    return torch.randn(shape, generator=generator, dtype=F64)


def optimisation(
    rows: int,
    slots: int,
    max_norm: float = 1.0,
    dtype: torch.dtype = F64,
    momentum: float | None = None,
) -> Optimisation:
    """A learning rate of its own for every host and every seed, so that none can be mixed up."""
    rates = torch.linspace(4e-3, 8e-3, rows * (slots + 1), dtype=F64).view(rows, slots + 1)
    rates = rates.to(dtype)
    return Optimisation(rates[:, 0], rates[:, 1:], 0.05, max_norm, momentum)


def _has_compiler() -> bool:
    """A compiler that is there and fails is no reason to skip anything."""
    # Of several workers in a fresh clone one compiles, and the others wait for it.
    with (Path(tempfile.gettempdir()) / f"esper-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            library()
        except NoCompiler:
            return False
    return True


needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2",
    reason="torch 2.13 corrupts memory in channels_last convolutions on processors without AVX-512",
)
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="torch has no bfloat16 LSTM on this processor",
)
needs_native = pytest.mark.skipif(not _has_compiler(), reason="there is no C++ compiler")

backend_name = "torch"
"""What ``backend_of`` makes; the fixture ``backend`` sets it."""


def backend_of(host: Host, dtype: torch.dtype = F64) -> Backend:
    """A backend for hosts of one shape."""
    if backend_name == "native":
        return NativeBackend(host, dtype)
    return TorchBackend(host, Precision("cpu"))


def train(
    host: Host,
    stack: Stack,
    state: SeedState,
    batches: list[tuple[Tensor, Tensor]],
    settings: Optimisation | None = None,
    backend: Backend | None = None,
) -> EpochResult:
    """One epoch, in place."""
    if settings is None:
        settings = optimisation(len(stack.host), len(host.slots), dtype=stack.host.dtype)
    backend = backend or backend_of(host, stack.host.dtype)
    return backend.train_epoch(stack, Seeds.training(state), minibatches(batches), settings)


def minibatches(batches: list[tuple[Tensor, Tensor]]) -> Minibatches:
    """The same minibatches as draws from a pool of images."""
    images = torch.stack([images.permute(3, 0, 1, 2, 4) for images, _ in batches], 1)
    labels = torch.stack([labels for _, labels in batches], 1)
    shape = labels.shape[:3]
    drawn = torch.arange(prod(shape)).view(shape)
    return Minibatches(images.flatten(0, 2), labels.flatten(0, 2), drawn)


def once(function: Callable) -> Callable:
    """Like ``functools.cache``, for arguments that have a text instead of a hash."""
    results: dict[str, Any] = {}

    def result(*arguments: Any) -> Any:
        key = repr(arguments)
        if key not in results:
            results[key] = function(*arguments)
        return results[key]

    return result


def naive_environments(
    host: Host,
    stack: Stack,
    garden: Garden,
    settings: Optimisation,
    module_of: Callable[[Any], Any] = naive_host,
) -> list[NaiveEnvironment]:
    """The oracle, at the numbers the stack has now. Alphas are those of the float32 state."""
    alphas = seed_state(garden, len(host.slots)).alpha
    environments = []
    for n, plants in enumerate(garden):
        module = module_of(host).to(F64)
        module.load(stack, n)
        seeds, rates = {}, {}
        for s, plant in plants.items():
            slot = host.slots[s]
            if plant.stage in IDLE_STAGES:
                continue
            seed = NaiveSeed(
                host, plant.blueprint, plant.style, slot, alphas[n, s].item(), plant.frozen
            ).to(F64)
            seed.load(slot, stack.seeds[s][n])
            seeds[slot.name] = seed
            rates[slot.name] = settings.seed_learning_rate[n, s].item()
        environments.append(
            NaiveEnvironment(
                module, seeds, settings.host_learning_rate[n].item(), rates, settings.weight_decay,
                settings.max_gradient_norm, settings.momentum,
            )
        )  # fmt: skip
    return environments


def train_naively(
    environments: list[NaiveEnvironment], batches: list[tuple[Tensor, Tensor]]
) -> None:
    """Every environment by itself on its own images."""
    for n, environment in enumerate(environments):
        for images, labels in batches:
            environment.train(images[:, :, :, n].permute(0, 3, 1, 2).contiguous(), labels[n])


def assert_same(actual: Tensor, expected: Tensor | float, what: str) -> None:
    """Equal to 1e-9 of the tensor's norm, or of 1 where that is smaller."""
    expected = torch.as_tensor(expected, dtype=F64).detach()
    assert actual.shape == expected.shape, what
    error = (actual.detach() - expected).norm().item()
    assert error <= TOLERANCE * max(expected.norm().item(), 1.0), f"{what}: off by {error:.3g}"


def assert_same_environment(
    host: Host, stack: Stack, n: int, environment: NaiveEnvironment
) -> None:
    """Parameters, statistics and optimizer state of row ``n`` are those of the oracle."""
    optimizer = stack.host_optimizer
    views = host.layout.views
    _assert_same_parameters(
        f"host {n}", dict(environment.host.named_parameters()), environment.host_optimizer,
        {name: view[n] for name, view in views(stack.host).items()},
        {name: view[n] for name, view in views(optimizer.first).items()},
        {name: view[n] for name, view in views(optimizer.second).items()}, optimizer.step[n],
    )  # fmt: skip
    buffers = host.buffers.views(stack.buffers)
    for name, expected in environment.host.statistics().items():
        assert_same(buffers[name][n], expected, f"host {n} {name}")
    for s, slot in enumerate(host.slots):
        if slot.name in environment.seeds:
            seed = environment.seeds[slot.name]
            optimizer = stack.seed_optimizers[s]
            _assert_same_parameters(
                f"{slot.name} of {n}, {seed.blueprint} {seed.style.name} at {seed.alpha}",
                seed.named(), environment.seed_optimizers[slot.name],
                seed_views(slot, seed.blueprint, stack.seeds[s][n]),
                seed_views(slot, seed.blueprint, optimizer.first[n]),
                seed_views(slot, seed.blueprint, optimizer.second[n]), optimizer.step[n],
            )  # fmt: skip


def seed_views(slot: SlotSpec, blueprint: str, row: Tensor) -> dict[str, Tensor]:
    """Named tensors of one row of a slot's store, those of the gate included."""
    views = slot.layouts[BLUEPRINTS.index(blueprint)].views(row[None])
    views |= slot.gate_layout.views(row[None, slot.gate_offset :])
    return {name: view[0] for name, view in views.items()}


def _assert_same_parameters(
    who: str, named: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer,
    values: dict[str, Tensor], first: dict[str, Tensor], second: dict[str, Tensor], step: Tensor,
) -> None:  # fmt: skip
    for name, parameter in named.items():
        assert_same(values[name], parameter, f"{who}, {name}")
        moments = optimizer.state.get(parameter)
        zero = torch.zeros_like(parameter)
        expected = moments or {"exp_avg": zero, "exp_avg_sq": zero, "step": 0.0}
        if isinstance(optimizer, torch.optim.SGD):
            # Without momentum torch keeps no buffer.
            if moments and moments.get("momentum_buffer") is not None:
                assert_same(first[name], moments["momentum_buffer"], f"{who}, {name}, momentum")
            continue
        assert_same(first[name], expected["exp_avg"], f"{who}, {name}, first moment")
        assert_same(second[name], expected["exp_avg_sq"], f"{who}, {name}, second moment")
        assert step.item() == float(expected["step"]), f"{who}, update count"


def copied(stack: Stack) -> Stack:
    """The same numbers in memory of their own."""
    return copy.deepcopy(stack)


def row_of(stack: Stack, n: int) -> dict[str, Tensor]:
    """Every number the stack holds of one environment, by name."""
    found = {"host": stack.host[n], "statistics": stack.buffers[n]}
    found |= _optimizer_row("host", stack.host_optimizer, n)
    for s, store in enumerate(stack.seeds):
        found[f"seed {s}"] = store[n]
        found |= _optimizer_row(f"seed {s}", stack.seed_optimizers[s], n)
    return {name: part.clone() for name, part in found.items()}


def slot_row_of(stack: Stack, s: int, n: int) -> dict[str, Tensor]:
    """Every number the stack holds of one slot of one environment, by name."""
    return {name: part for name, part in row_of(stack, n).items() if name.startswith(f"seed {s}")}


def _optimizer_row(name: str, state: AdamState, n: int) -> dict[str, Tensor]:
    return {
        f"{name} first moment": state.first[n],
        f"{name} second moment": state.second[n],
        f"{name} update count": state.step[n],
    }


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names with the same bits."""
    assert actual.keys() == expected.keys()
    for name, part in expected.items():
        assert torch.equal(actual[name], part), name


def small_task(host: Host, seed: int = 2) -> Task:
    """Random images. The validation set is longer than a pass and not a multiple of it."""
    generator = torch.Generator().manual_seed(seed)

    def split(count: int) -> tuple[Tensor, Tensor]:
        images = random_inputs(host, (count, *host.image), generator)
        return images, torch.randint(host.classes, (count, *host.label_shape), generator=generator)

    data = Dataset(
        *split(40), *split(130), *split(30), classes=host.classes, label_shape=host.label_shape
    )
    return Task("small", "random images", host, lambda: data, weight_decay=0.05)


def bank_of(task: Task, dtype: torch.dtype = F64) -> DataBank:
    """A data bank of one task."""
    return DataBank([(task, task.datasets())], dtype, CPU)


def small_engine(
    host: Host,
    rows: int,
    dtype: torch.dtype = F64,
    groups: list[int] | None = None,
    environments: list[int] | None = None,
    max_batches: int = 3,
) -> Engine:
    """An engine at the start of episode 0; by default every row is a group of its own."""
    identities = torch.tensor(environments or list(range(rows)))
    group = identities if groups is None else torch.tensor(groups)
    engine = Engine(
        bank_of(small_task(host), dtype), Rows(identities, group), seed=3,
        backend=backend_of(host, dtype), max_batches=max_batches, batch_size=6,
    )  # fmt: skip
    engine.reset(0)
    return engine


def planted(host: Host, garden: Garden) -> Engine:
    """An engine whose hosts and seeds have random parameters and statistics."""
    engine = small_engine(host, len(garden))
    engine.stack = random_stack(host, len(garden))
    return engine


def task_engine(
    *tasks: Task,
    groups: Sequence[int] | None = None,
    task_of: Sequence[int] | None = None,
    length: int = 5,
) -> Engine:
    """An engine in float64 at the start of episode 0; ``task_of`` is the task of each row."""
    bank = DataBank([(task, task.datasets()) for task in tasks], F64, CPU)
    backend = backend_of(tasks[0].host)
    for index, task in enumerate(tasks):
        hosts = trained_hosts(task, backend, F64, CPU)
        if hosts is not None:
            bank.trained_hosts[index] = hosts
    dataset = torch.tensor(task_of or range(len(tasks)))
    group = torch.tensor(groups or range(len(dataset)))
    engine = Engine(bank, Rows(group, group, dataset), 3, backend, 2, 6, length)
    engine.reset(0)
    return engine


def small_environments(
    tasks: Sequence[Task],
    environments: int | Sequence[int] | Tensor,
    precision: Precision = FULL,
    devices: Sequence[torch.device] = (CPU,),
    assignment: Tensor | None = None,
    **settings: Any,
) -> GrowthEnv:
    """Environments whose steps are short; ``settings`` are those of ``GrowthConfig``."""
    short = {"group_size": 2, "max_batches": 1, "batch_size": 6}
    if isinstance(environments, int):
        environments = range(environments)
    identities = torch.as_tensor(environments)
    config = GrowthConfig(**(short | settings))
    return GrowthEnv(tasks, identities, config, precision, *devices, assignment=assignment)


class OperationCounter(TorchDispatchMode):
    """Counts the operations that reach the dispatcher: all, and those that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatched = self.computing = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.dispatched += 1
        self.computing += not function.is_view
        return function(*args, **(kwargs or {}))


CACHED = {name: x for name, x in vars(SlotSpec).items() if isinstance(x, cached_property)}


@contextmanager
def own_blueprints() -> Iterator[None]:
    """What is registered inside is forgotten at the end, by slots that outlive it as well."""
    names, builders = list(BLUEPRINTS), dict(BUILDERS)
    values: dict[tuple[int, str], tuple[SlotSpec, Any]] = {}

    def of_this_time(attribute: "cached_property[Any]") -> property:
        def value(slot: SlotSpec) -> Any:
            key = id(slot), attribute.func.__name__
            if key not in values:
                values[key] = slot, attribute.func(slot)
            return values[key][1]

        return property(value)

    initial_distribution_on.cache_clear()
    try:
        with patch.multiple(SlotSpec, **{name: of_this_time(x) for name, x in CACHED.items()}):
            yield
    finally:
        initial_distribution_on.cache_clear()
        BLUEPRINTS[:] = names
        HEAD_WIDTHS["blueprint"] = len(names)
        BUILDERS.clear()
        BUILDERS.update(builders)
