"""Results of an environment are bitwise independent of all other environments."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper.kasmina.hosts.host import Host
from esper.leyline.actions import Style
from esper.tolaria.stores import Stack
from support import (
    F64,
    LIVES,
    Garden,
    Plant,
    assert_identical,
    every_plant,
    names_of,
    random_batches,
    random_stack,
    row_of,
    seed_state,
    slot_row_of,
    small_engine,
    small_host,
    small_mlp,
    train,
)

pytestmark = pytest.mark.usefixtures("backend")

HOST, MLP = small_host(), small_mlp()
SUBJECT, ROWS = 1, 4
NAN = float("nan")

Disturbance = Callable[[Stack, list[tuple[Tensor, Tensor]]], None]


def neighbours(store: Tensor) -> Tensor:
    """Mask of the rows of a store that do not belong to a subject, bool ``[N]``."""
    return torch.arange(len(store)) % ROWS != SUBJECT


def other_hosts(stack: Stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    stack.host[neighbours(stack.host)] *= -1.5
    stack.buffers[neighbours(stack.buffers)] += 0.3


def other_seeds(stack: Stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    for store in stack.seeds:
        store[neighbours(store)] *= -1.5


def other_images(stack: Stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    for images, labels in batches:
        images[:, :, :, neighbours(stack.host)] += 1.0
        labels[neighbours(labels)] = 0


def nan_hosts(stack: Stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    stack.host[neighbours(stack.host)] = NAN


def nan_statistics(stack: Stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    stack.buffers[neighbours(stack.buffers)] = NAN


def nan_seeds(stack: Stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    for store in stack.seeds:
        store[neighbours(store)] = NAN


def nan_images(stack: Stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    for images, _ in batches:
        images[:, :, :, neighbours(stack.host)] = NAN


def overflowing_hosts(stack: Stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    stack.host[neighbours(stack.host)] = 1e30


DISTURBANCES = (
    other_hosts, other_seeds, other_images, nan_hosts, nan_statistics, nan_seeds, nan_images,
    overflowing_hosts,
)  # fmt: skip


def gardens(host: Host) -> list[Garden]:
    """The subject and neighbours that grow the same kinds, so that all share every call."""
    lives = list(LIVES.values())
    styles = list(Style)
    found = []
    for i, name in enumerate(names_of(host)):
        plants = {s: Plant(name, styles[(i + s) % 4], **lives[(2 * i + s) % 5]) for s in range(3)}
        found.append([plants] * ROWS)
    return found


CASES = {
    name: (host, garden)
    for host in (HOST, MLP)
    for name, garden in zip(names_of(host), gardens(host), strict=True)
}


def trained(
    host: Host, garden: Garden, disturb: Disturbance | None, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The subject's rows after an epoch, its reported measurements and its scores."""
    stack = random_stack(host, len(garden), dtype)
    batches = random_batches(host, len(garden), count=3, dtype=dtype)
    if disturb is not None:
        disturb(stack, batches)
    state = seed_state(garden, 3)
    result = train(host, stack, state, batches)
    engine = small_engine(host, len(garden), dtype)
    engine.stack = stack
    measured = engine.measure(state, 0, committed=True)
    report = {
        "loss": result.loss,
        "accuracy": result.accuracy,
        "host norm": result.host_gradient_norm,
        "seed norms": result.seed_gradient_norm.nan_to_num(-1.0),
        "contribution": measured.contribution.nan_to_num(-1.0),
    }
    for s, norms in enumerate(result.seed_tensor_norms):
        report[f"tensor norms {s}"] = norms.nan_to_num(-1.0)
    for name, scores in (("scores", measured.scores), ("committed", measured.committed)):
        for part in ("loss", "accuracy", "expected"):
            report[f"{name} {part}"] = getattr(scores, part)
    return row_of(stack, SUBJECT), {name: part[SUBJECT] for name, part in report.items()}


def assert_independent(
    host: Host, garden: Garden, disturbances: tuple[Disturbance, ...], dtype: torch.dtype
) -> None:
    rows, report = trained(host, garden, None, dtype)
    assert all(part.isfinite().all() for part in (*rows.values(), *report.values()))
    for disturb in disturbances:
        other_rows, other_report = trained(host, garden, disturb, dtype)
        assert_identical(other_rows, rows)
        assert_identical(other_report, report)


every_dtype = pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["fp64", "fp32"])


@every_dtype
@pytest.mark.parametrize(("host", "garden"), CASES.values(), ids=CASES)
def test_results_are_bitwise_independent_of_other_environments(
    host: Host, garden: Garden, dtype: torch.dtype
):
    """Neighbours get another host, other seeds, other images, or NaN in any of these."""
    assert_independent(host, garden, DISTURBANCES, dtype)


@pytest.mark.parametrize("host", [HOST, MLP], ids=lambda host: type(host).__name__)
def test_the_disturbances_change_the_other_environments(host: Host):
    """Otherwise the test above would prove nothing."""
    garden = gardens(host)[0]
    for disturb in DISTURBANCES:
        stack, batches = random_stack(host, ROWS), random_batches(host, ROWS, count=1)
        disturb(stack, batches)
        undisturbed = random_stack(host, ROWS)
        train(host, stack, seed_state(garden, 3), batches)
        train(host, undisturbed, seed_state(garden, 3), random_batches(host, ROWS, count=1))
        assert not all(
            torch.equal(a, b)
            for a, b in zip(row_of(stack, 0).values(), row_of(undisturbed, 0).values(), strict=True)
        )


def test_results_do_not_depend_on_what_other_environments_grow():
    """The grouping of calls may reorder sums, so values are compared to 1e-12, not bitwise."""
    plants = {0: Plant("conv_light"), 1: Plant("norm", **LIVES["training"]), 2: Plant("bottleneck")}
    others = every_plant()
    expected, report = trained(HOST, [{}, plants, {}, {}], None, F64)
    for i in range(4):
        part = others[i * 40 :]
        garden = [{0: part[0], 1: part[9]}, plants, {2: part[17]}, {0: part[5], 2: part[30]}]
        rows, found = trained(HOST, garden, None, F64)
        for name, value in (rows | found).items():
            torch.testing.assert_close(
                value, (expected | report)[name], rtol=1e-12, atol=1e-12, msg=name
            )


def assert_same_in_any_subset(host: Host, blueprint: str) -> None:
    def trajectory(environments: list[int], groups: list[int]) -> dict[str, Tensor]:
        engine = small_engine(
            host, len(environments), groups=groups, environments=environments, max_batches=2
        )
        state = seed_state([{0: Plant(blueprint, alpha=0.5)} for _ in environments], 3)
        engine.reset(5)
        engine.germinate(state.living, state.blueprint, step=2)
        for step in (2, 3):
            engine.train(state, step)
        return row_of(engine.stack, environments.index(21))

    together = trajectory([3, 8, 21, 22], [0, 1, 2, 2])
    for environments, groups in (([21, 40], [2, 5]), ([22, 21, 3], [2, 2, 0])):
        for name, value in trajectory(environments, groups).items():
            torch.testing.assert_close(value, together[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("host", [HOST, MLP], ids=lambda host: type(host).__name__)
def test_any_subset_of_environments_gives_the_same_results(host: Host):
    """Results depend only on identities, so a subset of environments has the same trajectories."""
    assert_same_in_any_subset(host, names_of(host)[-1])


@every_dtype
@pytest.mark.parametrize("style", list(Style), ids=lambda style: style.name)
@pytest.mark.parametrize("name", CASES)
def test_an_isolated_seed_with_nan_does_not_affect_its_host(
    name: str, style: Style, dtype: torch.dtype
):
    """Neither its output nor its gradient reaches the host or the seeds of other slots."""
    host, _ = CASES[name]
    first, *_, last = names_of(host)
    garden: Garden = [
        {
            0: Plant(first, **LIVES["fossilised"]),
            1: Plant(name, style, **LIVES[life]),
            2: Plant(last, **LIVES["training"]),
        }
        for life in ("training", "about to blend")
    ]
    stacks = []
    for poison in (1.0, NAN):
        stack = random_stack(host, 2, dtype)
        stack.seeds[1] *= poison
        train(host, stack, seed_state(garden, 3), random_batches(host, 2, count=2, dtype=dtype))
        stacks.append(stack)
    healthy, poisoned = stacks
    assert poisoned.seeds[1].isnan().any()
    for n in range(2):
        rows, expected = row_of(poisoned, n), row_of(healthy, n)
        own = slot_row_of(healthy, 1, n).keys()
        assert_identical(
            {k: v for k, v in rows.items() if k not in own},
            {k: v for k, v in expected.items() if k not in own},
        )
