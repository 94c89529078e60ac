"""Baselines, their tuned recipes and wider hosts."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.module import ModuleHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.runtime.tasks import SUITES, Task, find
from esper_lab import baselines, controls
from esper_lab.baselines import (
    BASELINES,
    GROWN,
    Recipe,
    play_baseline,
    population_of,
    read_tuned,
    static_network,
    tuned_twin,
    widen,
)
from esper_lab.controls import TRIALS, ControlOutcomes, control_rungs
from esper_lab.copies import with_copies
from esper_lab.evaluation import (
    COPY_CHOICE,
    SHORT_SWEEP,
    STATIC_LOOKUP,
    STATIC_SIZES,
    SWEEP,
    WITHOUT_GROWING,
    Rung,
)
from esper_lab.plans import NEVER, Plan, PlannedSeed
from esper_lab.play import Floats, Hosts, Outcome, Population, Stages, play_plans
from esper_lab.small_copies import CHANGES
from tiny_population import LARGE, TASKS, hosts

HOSTS = hosts(4, data_seed=1)
TUNINGS = {"full tuning": "all", "last-layer tuning": "last", "Auto-RGN": "auto_rgn"}


@pytest.mark.parametrize("name", TUNINGS)
def test_a_baseline_trains_the_frozen_host_on_the_same_hosts_and_data(name: str):
    found = play_baseline(name, HOSTS, (0.1, 1.0))
    for member, rate in enumerate((3e-3, 3e-2)):
        tasks = [replace(t, host_learning_rate=rate, tuning=TUNINGS[name]) for t in HOSTS.tasks]
        own = play_plans(replace(HOSTS, tasks=tuple(tasks)), (NEVER,))
        np.testing.assert_array_equal(found.test_score[:, member], own.test_score[:, 0])
        np.testing.assert_array_equal(found.validation_score[:, member], own.validation_score[:, 0])
    assert (found.added == 0.0).all()
    assert (found.test_utility == found.test_score).all()
    frozen = play_plans(HOSTS, (NEVER,)).test_score[:, 0]
    # Half of the hosts meet permuted labels, which a host that learns adapts to.
    assert (found.test_score.max(1) > frozen + 0.02)[1::2].all()


def test_a_baseline_applies_to_all_hosts_or_to_none():
    free = replace(TASKS[0], host_learning_rate=None)
    for name in TUNINGS:
        assert population_of(name, HOSTS) is not None
        assert population_of(name, replace(HOSTS, tasks=(*TASKS, free))) is None


def wider(task: Task) -> Task:
    return replace(task, host=CnnHost((6, 20), 10, (8, 8, 1)), pretraining=None)


def narrower(task: Task) -> Task:
    return replace(task, host=CnnHost((2, 2), 10, (8, 8, 1)), pretraining=None)


@pytest.mark.parametrize("change", [wider, narrower])
def test_a_larger_host_pays_rent_for_what_it_has_more(monkeypatch, change):
    monkeypatch.setitem(BASELINES, "other size", change)
    found = play_baseline("other size", HOSTS, (1.0,))
    own, other = TASKS[0].host.parameter_count, change(TASKS[0]).host.parameter_count
    more = max(0, other - own)
    assert (found.added == more).all()
    price = TASKS[0].price * np.log1p(more / own)
    np.testing.assert_allclose(found.test_utility, found.test_score - price)
    np.testing.assert_allclose(found.validation_utility, found.validation_score - price)


def test_a_tuned_copy_pays_for_what_it_stores_and_the_choice_never_sees_the_test_split():
    """Against a naive loop over the hosts."""
    draws = np.random.default_rng(0)
    count = len(HOSTS.tasks)

    def rung(name: str) -> Rung:
        scores, validation = draws.random((2, count)).tolist()
        return Rung(name, False, scores, validation, [0.0] * count, score=scores)

    tunings = "last-layer tuning", *CHANGES, "full tuning"
    names = "never grow", *tunings, "Auto-RGN", "best fixed schedule"
    never, *tuned_rungs, _, _ = rungs = [rung(name) for name in names]
    found = with_copies(rungs, HOSTS.tasks)
    copies = [f"{name} of a copy" for name in tunings]
    assert [one.name for one in found] == [*names[:-1], *copies, "best copy or none", names[-1]]
    assert [*found[:7], found[-1]] == rungs
    for host, task in enumerate(HOSTS.tasks):
        own = task.host.parameter_count
        # Weights of 9 x 6, 54 x 8 and 8 x 10; norms of 6 and 8 channels.
        ranks = [rank * (9 + 6 + 54 + 8 + 8 + 10) for rank in (1, 4)]
        sizes = [task.host.block_sizes[-1], 90 + 2 * (6 + 8), *ranks, own]
        worth = [(never.validation[host], never.utility[host], 0.0)]
        for stored, tuned, copy in zip(sizes, tuned_rungs, found[7:12], strict=True):
            price = task.price * math.log(1.0 + stored / own)
            assert copy.added[host] == stored
            assert copy.score == tuned.score
            utility, validation = tuned.utility[host] - price, tuned.validation[host] - price
            assert copy.utility[host] == pytest.approx(utility)
            assert copy.validation[host] == pytest.approx(validation)
            worth.append((validation, utility, float(stored)))
        best = max(worth)
        choice = found[12]
        assert (choice.validation[host], choice.utility[host]) == pytest.approx(best[:2])
        assert choice.added[host] == best[2]
    # Copies that ship with the controls are not there twice, and hosts from scratch have none.
    assert with_copies(found, HOSTS.tasks) == found
    assert with_copies([never, rungs[-1]], HOSTS.tasks) == [never, rungs[-1]]


def outcome(utility: Floats, added: Floats | float = 0.0) -> Outcome:
    added = np.broadcast_to(added, utility.shape)
    features = np.zeros((len(utility), 12, 40))
    return Outcome(utility, utility, utility, utility, utility, added, features)


def test_the_rate_is_chosen_on_training_hosts_and_scored_on_fresh_ones(monkeypatch, tmp_path):
    played: list[tuple[int, tuple[float, ...]]] = []

    def playing(
        name: str, population: Population, factors: tuple[float, ...], on_batch: object
    ) -> Outcome:
        played.append((population.first, factors))
        return outcome(np.array([factors] * len(population.tasks)) % 0.9)

    monkeypatch.setattr(controls, "play_baseline", playing)
    monkeypatch.setitem(baselines.FACTORS, "full tuning", (0.1, 0.5, 1.0))
    stages = Stages(tmp_path, lambda stage, done, total: None)
    found = controls._of_baseline(stages, "full tuning", hosts(3), hosts(2, first=9))
    assert played == [(0, (0.1, 0.5, 1.0)), (9, (0.5,))]
    assert found.test_utility.tolist() == [[0.5]] * 2
    # Both stages are kept, and a baseline without a grid needs no training hosts.
    controls._of_baseline(stages, "full tuning", hosts(3), hosts(2, first=9))
    assert len(played) == 2
    monkeypatch.setitem(baselines.FACTORS, "full tuning", (2.0,))
    controls._of_baseline(stages, "full tuning", hosts(3), hosts(2, first=9))
    assert played[2:] == [(9, (2.0,))]


def test_the_baselines_are_known_to_the_reader_of_a_ladder():
    of_capacity = {STATIC_LOOKUP, *STATIC_SIZES, SHORT_SWEEP, SWEEP}
    assert {*BASELINES, COPY_CHOICE, *of_capacity} == {*WITHOUT_GROWING}


def test_adapters_everywhere_are_as_large_as_what_the_best_looking_rule_adds(monkeypatch):
    """Three sizes at once; the rule adds about as much as the second, which is not the best."""
    seeds = [PlannedSeed(0.0, size, 0.0) for size in (0.2, 0.5, 0.9)]
    at_once = [Plan(f"size {seed.size}", (seed,), at_once=True) for seed in seeds]
    plans = (NEVER, *at_once, LARGE)
    utility = np.tile([0.3, 0.6, 0.2, 0.3, 0.7], (20, 1))
    added = np.tile([0.0, 50.0, 120.0, 500.0, 100.0], (20, 1))
    library_outcome = outcome(utility, added)
    trials = outcome(np.zeros((20, len(TRIALS))))
    played = ControlOutcomes(library_outcome, library_outcome, library_outcome, trials, trials, {})
    monkeypatch.setattr(controls.rules, "TREES", 2)
    for frozen, names in ((True, ["adapters everywhere"]), (False, [])):
        tasks = hosts(20).tasks
        if not frozen:
            tasks = tuple(replace(task, host_learning_rate=None) for task in tasks)
        population = Population(tasks)
        rungs = control_rungs(played, Hosts(population, population), plans)
        found = [rung for rung in rungs if rung.name == "adapters everywhere"]
        assert [rung.name for rung in found] == names
        for rung in found:
            assert rung.chosen == [2] * 20
            assert rung.added == [120.0] * 20
        everything = next(rung for rung in rungs if rung.name == "everything at step 0")
        assert everything.chosen == [1] * 20


NAMES = [*SUITES["suite"], *SUITES["held_out"]]
TUNED = read_tuned()


@pytest.mark.parametrize("name", NAMES)
def test_a_task_and_its_networks_have_recipes_of_their_own_and_the_static_one_the_grown_size(
    name: str,
):
    task = find(name)
    twin, static = tuned_twin(task), static_network(task)
    assert Recipe.of(task) == TUNED[name].shared
    assert twin is not None
    assert static is not None
    assert Recipe.of(twin) == TUNED[name].host
    assert TUNED[name].shared.on(twin) == task
    assert Recipe.of(static) == TUNED[name].static
    assert TUNED[name].shared.on(replace(static, host=task.host)) == task
    size = static.host.parameter_count
    assert size == TUNED[name].static_parameters
    assert size == pytest.approx(GROWN * task.host.parameter_count, rel=0.1)


@pytest.mark.parametrize("name", ["adaptation:3", "text_bytes", "cifar_baseline"])
def test_tasks_that_were_not_tuned_have_no_such_network(name: str):
    assert tuned_twin(find(name)) is None
    assert static_network(find(name)) is None


def test_the_split_of_a_task_is_that_of_its_networks():
    task = find("digits_drift").with_split(5)
    for made in (tuned_twin(task), static_network(task)):
        assert made is not None
        assert made.split_seed == 5
        assert made.drift == task.drift


def test_a_recipe_is_written_in_words():
    assert str(Recipe(0.05)) == "0.05 constant"
    recipe = Recipe(0.1, "cosine", max_gradient_norm=10.0, weight_decay=0.01)
    assert str(recipe) == "0.1 cosine, clip 10, weight decay 0.01"


def test_a_table_of_another_format_is_an_error(tmp_path):
    path = tmp_path / "recipes.json"
    path.write_text('{"digits": {"host": {"learning_rate": 0.1}}}')
    with pytest.raises(msgspec.ValidationError):
        read_tuned(path)


CNN = CnnHost((4, 8), classes=10, image=(8, 8, 1), pools=1, slot_names=("r1c0",))
MLP = MlpHost(widths=(16, 16), classes=10, image=(8, 8, 1))
GPT = TransformerHost(layers=2, width=32, heads=4, context=8)
WIDENED = [CNN, MLP, GPT]


def widths(host: Host) -> tuple[int, ...]:
    if isinstance(host, TransformerHost):
        return (host.width,)
    return host.channels if isinstance(host, CnnHost) else host.widths  # type: ignore[attr-defined]


@pytest.mark.parametrize("host", WIDENED, ids=lambda host: host.summary)
@pytest.mark.parametrize("times", [0.3, 1.0, 2.0, 3.0, 10.0])
def test_no_other_factor_comes_nearer(host: Host, times: float):
    wanted = round(times * host.parameter_count)
    found = widen(host, wanted)
    assert found is not None
    assert (found.image, found.classes, found.slot_names) == (
        *(host.image, host.classes),
        host.slot_names,
    )
    others = [widen(host, wanted + step * host.parameter_count // 20) for step in range(-5, 6)]
    distance = abs(found.parameter_count - wanted)
    assert distance == min(abs(o.parameter_count - wanted) for o in others if o is not None)
    # Width grows with the root of the parameters, in every block by the same factor.
    factors = [new / old for new, old in zip(widths(found), widths(host), strict=True)]
    assert max(factors) - min(factors) <= 1.0 / min(widths(host))
    assert distance <= 0.2 * wanted


@pytest.mark.parametrize("host", WIDENED, ids=lambda host: host.summary)
def test_a_host_is_the_widened_host_of_its_own_size(host: Host):
    assert widen(host, host.parameter_count) == host


def test_sizes_are_those_of_the_closed_form():
    found = widen(CnnHost((4, 8), classes=10, image=(8, 8, 1)), 3 * 438)
    assert found is not None
    a, b = widths(found)
    assert found.parameter_count == 9 * a + 9 * a * b + 2 * (a + b) + 10 * b + 10
    assert (a, b) == (8, 15)


def test_the_width_of_a_gpt_stays_a_multiple_of_its_heads():
    found = widen(GPT, 2 * GPT.parameter_count)
    assert isinstance(found, TransformerHost)
    assert (found.heads, found.width % 4) == (4, 0)


def test_a_smaller_size_than_any_gives_one_channel_per_block():
    assert widths(widen(CNN, 1)) == (1, 1)  # type: ignore[arg-type]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def test_the_width_of_a_users_module_is_unknown():
    assert widen(ModuleHost(Net, 10, (8, 8, 1)), 1000) is None
