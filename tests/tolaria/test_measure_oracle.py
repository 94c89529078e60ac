"""Validation, ablation and commitment compared with one module per environment, in fp64."""

import math
from dataclasses import replace

import pytest
import torch

from esper.kasmina.hosts.host import Host
from esper.leyline.actions import Style
from esper.leyline.stages import ACTING, Stage
from esper.tolaria.engine import Engine
from esper.tolaria.results import Scores
from support import (
    F64,
    MLP_NAMES,
    SPANNED,
    Garden,
    Plant,
    assert_same,
    bank_of,
    gardens_of,
    mixed_gardens,
    naive_environments,
    once,
    planted,
    seed_state,
    small_host,
    small_mlp,
    small_task,
)

pytestmark = pytest.mark.usefixtures("backend")

HOST, MLP = small_host(), small_mlp()


def assert_same_scores(scores: Scores, n: int, expected: tuple[float, float, float]) -> None:
    for name, value in zip(("loss", "accuracy", "expected"), expected, strict=True):
        assert_same(getattr(scores, name)[n], value, f"{name} of {n}")


Triple = tuple[float, float, float]
Row = tuple[Triple, Triple, dict[int, Triple]]
"""Scores of the whole network, of its fossils alone, and without each acting slot's seed."""


def rows_of(engine: Engine, garden: Garden, split: str) -> list[Row]:
    """The oracle's scores."""
    environments = naive_environments(engine.host, engine.stack, garden, engine.optimisation(0))
    images = getattr(engine.bank, f"{split}_images")[0].permute(0, 3, 1, 2)
    labels = getattr(engine.bank, f"{split}_labels")[0]
    rows = []
    for plants, environment in zip(garden, environments, strict=True):
        name_of = {s: engine.slots[s].name for s in plants}
        loose = tuple(name_of[s] for s, p in plants.items() if p.stage is not Stage.FOSSILISED)
        without = {
            s: environment.score(images, labels, (name_of[s],))
            for s, plant in plants.items()
            if plant.stage in ACTING
        }
        whole = environment.score(images, labels)
        rows.append((whole, environment.score(images, labels, loose), without))
    return rows


@once
def rows_planted(host: Host, garden: Garden) -> list[Row]:
    """Those of new engines, which are the same for every backend."""
    return rows_of(planted(host, garden), garden, "validation")


def check(
    engine: Engine, garden: Garden, split: str = "validation", rows: list[Row] | None = None
) -> None:
    slots = engine.slots
    state = seed_state(garden, len(slots))
    measured = engine.measure(state, 0, committed=True, split=split)
    fossils_alone = engine.committed_scores(state, 0, split)
    assert measured.committed is not None
    for n, (whole, committed, without) in enumerate(rows or rows_of(engine, garden, split)):
        assert_same_scores(measured.scores, n, whole)
        assert_same_scores(measured.committed, n, committed)
        assert_same_scores(fossils_alone, n, committed)
        for s in range(len(slots)):
            found = measured.contribution[n, s].item()
            if s not in without:
                assert math.isnan(found)
                continue
            # The contribution is kept in float32.
            assert found == pytest.approx(whole[2] - without[s][2], rel=1e-6, abs=1e-9)


BARE: Garden = [{}, {}, {}]
CASES = [
    *((HOST, garden) for garden in mixed_gardens(slots=3, rows=16)),
    *((MLP, garden) for garden in [*mixed_gardens(3, 18, MLP_NAMES), BARE, [{}]]),
    *((host, garden) for host in SPANNED for garden in gardens_of(host, 31)),
    *((small_host(kernel=kernel, pools=p), BARE) for kernel in (1, 3) for p in (0, 1, 2)),
]


@pytest.mark.parametrize(
    ("host", "garden"), CASES, ids=lambda x: str(len(x)) if isinstance(x, list) else x.summary
)
def test_scores_ablations_and_commitments_match_the_modules(host: Host, garden: Garden):
    check(planted(host, garden), garden, rows=rows_planted(host, garden))


def test_the_test_split_is_measured_on_request():
    garden: Garden = [{0: Plant("conv_light"), 2: Plant("norm", Style.GATED_GATE)}, {}]
    engine = planted(HOST, garden)
    check(engine, garden, "test")
    state = seed_state(garden, 3)
    validation, test = (engine.measure(state, 0, False, s).scores for s in ("validation", "test"))
    assert not torch.equal(validation.loss, test.loss)


def test_a_part_of_the_validation_images_is_measured_in_turn():
    """All are measured with the commitments, which count; the rest of 130 belongs to no part."""
    garden: Garden = [{0: Plant("conv_light"), 2: Plant("norm", alpha=0.5)}, {}]
    engine, state = planted(HOST, garden), seed_state(garden, 3)
    engine.bank = bank_of(replace(small_task(HOST), validation_part=40))
    environments = naive_environments(HOST, engine.stack, garden, engine.optimisation(0))
    label_of = {
        image.sum().item(): int(label)
        for image, label in zip(
            engine.bank.validation_images[0], engine.bank.validation_labels[0], strict=True
        )
    }
    turns = []
    for step in range(4):
        held_back = engine.bank.validation_part(step, torch.zeros(2, dtype=torch.long))
        part, labels = held_back.images[0], held_back.labels[0]
        turns.append({image.sum().item() for image in part})
        assert labels.tolist() == [label_of[image.sum().item()] for image in part]
        for _ in range(2):
            measured = engine.measure(state, step, committed=False)
            for n, environment in enumerate(environments):
                expected = environment.score(part.permute(0, 3, 1, 2), labels)
                assert_same_scores(measured.scores, n, expected)
    assert [len(turn) for turn in turns] == [40] * 4
    assert turns[3] == turns[0]
    assert len(set.union(*turns[:3])) == 120
    assert set.union(*turns) < label_of.keys()
    check(engine, garden)
    check(engine, garden, "test")
    assert len(bank_of(replace(small_task(HOST), validation_part=130)).parts) == 1


def test_fossilisation_changes_only_the_committed_scores():
    """Committed scores exclude seeds that are not fossilised, in any slot."""
    parts = [Stage.FOSSILISED, Stage.HOLDING]
    garden: Garden = [
        {0: Plant("conv_light", stage=first), 1: Plant("conv_heavy", stage=second)}
        for first in parts
        for second in parts
    ]
    engine = planted(HOST, garden)
    for store in (engine.stack.host, engine.stack.buffers, *engine.stack.seeds):
        store.copy_(store[:1].expand_as(store))
    check(engine, garden)
    measured = engine.measure(seed_state(garden, 3), 0, committed=True)
    assert measured.scores.expected.unique().numel() == 1
    assert measured.committed.expected.unique().numel() == len(garden)


def test_commitments_are_optional_and_measuring_changes_no_state():
    garden: Garden = [{0: Plant("conv_light"), 1: Plant("attention", alpha=0.5)}, {}]
    engine = planted(HOST, garden)
    before = [t.clone() for t in (engine.stack.host, engine.stack.buffers, *engine.stack.seeds)]
    assert engine.measure(seed_state(garden, 3), 0, committed=False).committed is None
    after = (engine.stack.host, engine.stack.buffers, *engine.stack.seeds)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_seed_without_effect_has_contribution_zero():
    garden: Garden = [{0: Plant("conv_light")}, {0: Plant("norm"), 1: Plant("attention")}]
    engine = planted(HOST, garden)
    for store in engine.stack.seeds:
        store.zero_()
    contribution = engine.measure(seed_state(garden, 3), 0, committed=False).contribution
    nan = float("nan")
    expected = torch.tensor([[0.0, nan, nan], [0.0, 0.0, nan]])
    assert torch.equal(contribution.isnan(), expected.isnan())
    assert contribution.nan_to_num().to(F64).abs().max() == 0.0
