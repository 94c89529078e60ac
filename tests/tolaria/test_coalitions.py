"""Coalitions compared with brute force, Shapley values with their definition."""

import math
import random
from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor

from esper.kasmina.hosts.host import Host
from esper.kasmina.seeds import SeedState
from esper.leyline.stages import ACTING
from esper.tolaria.coalitions import MAX_FOR_SHAPLEY, Coalitions, coalition_members
from esper.tolaria.engine import Engine
from support import (
    F64,
    Garden,
    Plant,
    every_plant,
    names_of,
    planted,
    seed_state,
    small_host,
    small_mlp,
)

pytestmark = pytest.mark.usefixtures("backend")

HOSTS: dict[str, Host] = {
    "two": small_host(pools=0),
    "three": small_host(),
    "four": small_host(channels=(3, 5, 4)),
    "five": small_host(channels=(3, 5, 4), pools=2),
    "three of an mlp": small_mlp(),
}
NAN = math.nan


def garden_of(host: Host) -> Garden:
    """Rows in which none, one, some or all seeds act, and rows with seeds that do not act yet."""
    slots = len(host.slots)
    plants = [p for p in every_plant(names_of(host)) if p.stage in ACTING and p.alpha > 0]
    random.Random(3).shuffle(plants)
    living = iter(plants * 3)
    rows: Garden = [{}, {0: Plant(names_of(host)[0])}, {slots - 1: next(living)}]
    for size in range(2, slots + 1):
        for chosen in ((*range(size),), (*range(slots - size, slots),)):
            rows.append({s: next(living) for s in chosen})
    idle = [p for p in every_plant(names_of(host)) if p.alpha == 0]
    rows.append({s: next(living) if s else idle[7] for s in range(slots)})
    rows.append({s: next(living) if s != 1 else idle[11] for s in range(slots)})
    return rows


def worth(engine: Engine, state: SeedState, kept: tuple[int, ...]) -> list[float]:
    """Expected accuracy of the hosts with only the seeds in the slots ``kept``."""
    alpha = torch.zeros_like(state.alpha)
    alpha[:, list(kept)] = state.alpha[:, list(kept)]
    masked = SeedState(**{f: getattr(state, f) for f in state.__slots__} | {"alpha": alpha})
    return engine.measure(masked, 0, committed=False).scores.expected.tolist()


Game = dict[frozenset[int], float]


def shapley_by_orders(game: Game, players: list[int]) -> dict[int, float]:
    """Mean marginal contribution of each player over all orders."""
    total = dict.fromkeys(players, 0.0)
    for order in permutations(players):
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            total[player] += game[before | {player}] - game[before]
    return {player: value / math.factorial(len(players)) for player, value in total.items()}


def coalitions_of(game: Game, slots: int, acts: Tensor | None = None) -> Coalitions:
    """Coalitions of one environment in which all seeds act, with the values of ``game``."""
    members = coalition_members(slots)
    value = [game[frozenset(row.nonzero()[:, 0].tolist())] for row in members]
    everyone = torch.ones(1, slots, dtype=torch.bool) if acts is None else acts
    return Coalitions(members, everyone, torch.tensor([value], dtype=F64))


def random_game(slots: int, seed: int = 0) -> Game:
    draw = random.Random(seed)
    return {
        frozenset(chosen): draw.uniform(0.1, 0.9)
        for size in range(slots + 1)
        for chosen in combinations(range(slots), size)
    }


# --- measured on hosts ------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_coalition_values_match_brute_force(host: Host):
    garden, slots = garden_of(host), len(host.slots)
    engine, state = planted(host, garden), seed_state(garden, slots)
    found = engine.coalitions(state, 0)
    sizes = range(slots + 1 if slots <= 4 else 3)
    subsets = [c for size in sizes for c in combinations(range(slots), size)]
    assert [tuple(row.nonzero()[:, 0].tolist()) for row in found.members] == subsets
    brute = {kept: worth(engine, state, kept) for kept in subsets}
    for column, kept in enumerate(subsets):
        expected = torch.tensor(brute[kept], dtype=F64)
        torch.testing.assert_close(
            found.value[:, column], expected, rtol=1e-12, atol=1e-12, msg=str(kept)
        )

    shapley, interactions = found.shapley(), found.interactions()
    whole = engine.measure(state, 0, committed=False).scores.expected
    for n, plants in enumerate(garden):
        acting = [s for s, plant in plants.items() if plant.alpha > 0]
        for i in range(slots):
            for j in range(slots):
                if i == j or i not in acting or j not in acting:
                    assert interactions[n, i, j].isnan()
                    continue
                pair = (min(i, j), max(i, j))
                expected = brute[pair][n] - brute[i,][n] - brute[j,][n] + brute[()][n]
                assert interactions[n, i, j].item() == pytest.approx(expected, abs=1e-12)
        if slots > 4:
            assert shapley[n].isnan().all()
            continue
        assert shapley[n].isfinite().nonzero()[:, 0].tolist() == acting
        game = {frozenset(kept): values[n] for kept, values in brute.items()}
        for s, expected in shapley_by_orders(game, acting).items():
            assert shapley[n, s].item() == pytest.approx(expected, abs=1e-12)
        share = sum(shapley[n, s].item() for s in acting)
        assert share == pytest.approx(whole[n].item() - brute[()][n], abs=1e-12)
        if len(acting) == 1:
            contribution = engine.measure(state, 0, committed=False).contribution
            assert share == pytest.approx(contribution[n, acting[0]].item(), abs=1e-7)


def test_a_seed_without_effect_has_shapley_value_zero():
    host = small_host()
    garden: Garden = [{0: Plant("conv_light"), 1: Plant("norm"), 2: Plant("conv_heavy")}] * 3
    engine, state = planted(host, garden), seed_state(garden, 3)
    engine.stack.seeds[1][0] = 0.0
    found = engine.coalitions(state, 0)
    shapley, interactions = found.shapley(), found.interactions()
    assert shapley[0, 1].item() == pytest.approx(0.0, abs=1e-15)
    assert shapley[1, 1].abs() > 1e-6
    for other in (0, 2):
        assert interactions[0, 1, other].item() == pytest.approx(0.0, abs=1e-15)
        assert interactions[1, 1, other].abs() > 1e-9


def test_measuring_coalitions_changes_no_state():
    host = HOSTS["three"]
    garden = garden_of(host)
    engine, state = planted(host, garden), seed_state(garden, 3)
    before = [part.clone() for part in (engine.stack.host, engine.stack.buffers)]
    before += [store.clone() for store in engine.stack.seeds]
    alpha = state.alpha.clone()
    engine.coalitions(state, 0)
    after = (engine.stack.host, engine.stack.buffers, *engine.stack.seeds)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(state.alpha, alpha)


# --- games with known values ------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_shapley_values_match_means_over_orders(slots: int):
    for seed in range(5):
        game = random_game(slots, seed)
        found = coalitions_of(game, slots).shapley()[0].tolist()
        expected = shapley_by_orders(game, list(range(slots)))
        assert found == pytest.approx([expected[s] for s in range(slots)], abs=1e-12)
        assert sum(found) == pytest.approx(game[frozenset(range(slots))] - game[frozenset()])


def test_shapley_values_satisfy_their_axioms():
    """Symmetry, dummy and additivity (Shapley, 1953)."""
    glove = {c: float(0 in c and len(c) > 1) for c in random_game(3)}
    assert coalitions_of(glove, 3).shapley()[0].tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    unanimity = {c: float({0, 2} <= c) for c in random_game(4)}
    assert coalitions_of(unanimity, 4).shapley()[0].tolist() == pytest.approx([0.5, 0, 0.5, 0])
    one, two = random_game(4, 1), random_game(4, 2)
    both = {c: one[c] + two[c] for c in one}
    parts = [coalitions_of(game, 4).shapley() for game in (one, two, both)]
    torch.testing.assert_close(parts[0] + parts[1], parts[2], rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("slots", [2, 3, 4, 5])
def test_additive_seeds_do_not_interact(slots: int):
    weight = [0.3 * (s + 1) for s in range(slots)]
    additive = {c: 0.1 + sum(weight[s] for s in c) for c in random_game(slots)}
    coalitions = coalitions_of(additive, slots)
    pairs = coalitions.interactions()[0]
    assert pairs.diagonal().isnan().all()
    assert pairs.nan_to_num(0.0).abs().max() < 1e-12
    if slots <= MAX_FOR_SHAPLEY:
        assert coalitions.shapley()[0].tolist() == pytest.approx(weight)
    else:
        assert coalitions.shapley().isnan().all()


def test_seeds_that_do_not_act_have_nan_values():
    game = random_game(3)
    game = {c: game[c - {1}] for c in game}
    acts = torch.tensor([[True, False, True]])
    coalitions = coalitions_of(game, 3, acts)
    values, pairs = coalitions.shapley()[0], coalitions.interactions()[0]
    expected = shapley_by_orders(game, [0, 2])
    assert values.isnan().tolist() == [False, True, False]
    assert [values[0].item(), values[2].item()] == pytest.approx([expected[0], expected[2]])
    assert pairs.isfinite().nonzero().tolist() == [[0, 2], [2, 0]]
