"""Slots that span a layer: units change nothing at birth, learn aside, make the layer wider."""

from dataclasses import replace

import pytest
import torch

from esper.kasmina.hosts.host import Host
from esper.leyline.actions import BLUEPRINTS, Style
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.plan import Seeds, Variant
from support import (
    F64,
    LIVES,
    SPANNED,
    Garden,
    Plant,
    assert_identical,
    copied,
    gardens_of,
    needs_native,
    optimisation,
    planted,
    random_batches,
    random_stack,
    row_of,
    seed_state,
    slot_row_of,
    small_engine,
    train,
)

every_host = pytest.mark.parametrize("host", SPANNED, ids=lambda h: f"{h.summary} {h.slot_names}")
NAN = float("nan")


def births(host: Host, life: str) -> Garden:
    """A seed of every blueprint and style in each slot that spans a layer, one a host."""
    return [
        {s: Plant(BLUEPRINTS[kind], style, **LIVES[life])}
        for s, slot in enumerate(host.slots)
        if slot.span is not None
        for kind in slot.kinds
        for style in Style
    ]


@every_host
def test_new_units_do_not_change_the_scores(host: Host, backend: str):
    garden = births(host, "fossilised")
    engine, slots = small_engine(host, len(garden), torch.float32), len(host.slots)
    state = seed_state(garden, slots)
    engine.germinate(state.living, state.blueprint, step=0)
    with_units = engine.measure(state, 0, committed=False)
    without = engine.measure(seed_state([{}] * len(garden), slots), 0, committed=False)
    for name in ("loss", "accuracy", "expected"):
        change = getattr(with_units.scores, name) - getattr(without.scores, name)
        assert change.abs().max() <= 1e-6
    assert with_units.contribution[state.living].abs().max() <= 1e-6


@every_host
def test_units_that_learn_aside_leave_their_host_its_bits(host: Host, backend: str):
    """Even if they are NaN, and in validation as well."""
    for life in ("training", "about to blend"):
        garden = births(host, life)
        rows, slots = len(garden), len(host.slots)
        batches = random_batches(host, rows, count=2, dtype=torch.float32)
        alone, beside = (random_stack(host, rows, torch.float32) for _ in range(2))
        for store in beside.seeds:
            store[::2] = NAN
        train(host, alone, seed_state([{}] * rows, slots), batches)
        result = train(host, beside, seed_state(garden, slots), batches)
        assert torch.equal(alone.host, beside.host)
        assert torch.equal(alone.buffers, beside.buffers)
        learning = result.seed_gradient_norm[1::2].nan_to_num()
        assert bool((learning.sum(1) > 0).all())
        engine = small_engine(host, rows, torch.float32)
        engine.stack = beside
        state = seed_state(garden, slots)
        assert bool(engine.measure(state, 0, committed=False).scores.loss.isfinite().all())


@every_host
def test_rows_of_different_widths_are_independent_bit_by_bit(host: Host, backend: str):
    garden = gardens_of(host, 8)[0]
    assert len({frozenset(p.blueprint for p in plants.values()) for plants in garden}) > 1
    rows, slots = len(garden), len(host.slots)
    batches = random_batches(host, rows, count=2, dtype=torch.float32)
    clean, state = random_stack(host, rows, torch.float32), seed_state(garden, slots)
    sick = copied(clean)
    for store in (sick.host, *sick.seeds):
        store[1:] = NAN
    for stack in (clean, sick):
        train(host, stack, state, batches)
    assert_identical(row_of(sick, 0), row_of(clean, 0))


def test_a_host_alone_is_scored_with_several_alphas(backend: str):
    host, slots = SPANNED[0], len(SPANNED[0].slots)
    names = [BLUEPRINTS[slot.kinds[0]] for slot in host.slots]
    garden: Garden = [{s: Plant(name, alpha=0.7) for s, name in enumerate(names)}]
    engine, data = planted(host, garden), torch.zeros(1, dtype=torch.long)
    held_back, alphas = engine.bank.held_back("test", data), torch.full((3, slots), 0.7)
    alphas[:, 0] = torch.tensor([0.2, 0.3, 0.0])
    seeds = [Seeds.acting(replace(seed_state(garden, slots), alpha=row[None])) for row in alphas]
    expected = [engine.backend.evaluate(engine.stack, one, held_back, [])[0].loss for one in seeds]
    variant = Variant(0, data.expand(3), alphas)
    _, (scores,) = engine.backend.evaluate(engine.stack, seeds[0], held_back, [variant])
    torch.testing.assert_close(scores.loss, torch.cat(expected), rtol=1e-12, atol=0.0)


@every_host
def test_an_empty_slot_keeps_every_bit(host: Host, backend: str):
    rows, slots = 2, len(host.slots)
    stack = random_stack(host, rows)
    before = [slot_row_of(stack, s, 1) for s in range(slots)]
    train(host, stack, seed_state([births(host, "holding")[0], {}], slots), random_batches(host, 2))
    for s in range(slots):
        assert_identical(slot_row_of(stack, s, 1), before[s])


@needs_native
@every_host
def test_native_results_are_the_same_bits_with_any_number_of_threads(host: Host):
    garden = gardens_of(host, 12)[0]
    slots, found = len(host.slots), []
    batches = random_batches(host, len(garden), dtype=torch.float32)
    for threads in (1, 3):
        stack = random_stack(host, len(garden), torch.float32)
        backend = NativeBackend(host, torch.float32, threads)
        train(host, stack, seed_state(garden, slots), batches, backend=backend)
        found.append(
            {f"{n} {k}": v for n in range(len(garden)) for k, v in row_of(stack, n).items()}
        )
    assert_identical(*found)


@needs_native
@every_host
def test_native_float_agrees_with_double(host: Host):
    """One minibatch, by the losses and the median of the tensors: at a ReLU's edge some differ."""
    garden = gardens_of(host, 12)[0]
    rows, slots, found = len(garden), len(host.slots), []
    for dtype in (F64, torch.float32):
        stack = random_stack(host, rows, dtype)
        batches = random_batches(host, rows, count=1, dtype=dtype)
        rates = optimisation(rows, slots, max_norm=1e9, dtype=dtype)
        result = train(
            host, stack, seed_state(garden, slots), batches, rates, NativeBackend(host, dtype)
        )
        moments = [state.first for state in (stack.host_optimizer, *stack.seed_optimizers)]
        found.append((result.loss.to(F64), [moment.to(F64) for moment in moments]))
    (exact, gradients), (loss, rounded) = found
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=1e-6)
    errors = [
        (a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-4)
        for a, b in zip(gradients, rounded, strict=True)
    ]
    assert float(torch.cat(errors).median()) < 1e-5
