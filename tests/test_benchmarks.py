"""Benchmarks and scripts: each can be imported and explains itself; pages come from the figures."""

import ast
import importlib
import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from scipy import stats

from esper.kasmina.channel_groups import channel_groups
from esper.runtime.tasks import find
from esper.tamiyo.baselines import NeverActor
from esper_lab.baselines import Recipe, TunedRecipes, read_tuned
from esper_lab.ladder_steps import points_text
from esper_lab.play import Population, play

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).glob("*.py")
    if "__main__" in path.read_text()
)


pytestmark = pytest.mark.usefixtures("scripts_on_path")


@pytest.mark.usefixtures("scratch_register")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_imported_and_explains_itself(path: Path, monkeypatch, capsys) -> None:
    if re.search("^from (sb3_contrib|stable_baselines3)", path.read_text(), re.MULTILINE):
        pytest.importorskip("sb3_contrib")
    module = importlib.import_module(path.stem)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 0
    first = module.__doc__.splitlines()[0]
    assert first in " ".join(capsys.readouterr().out.split())


def test_a_page_is_written_with_its_command_and_its_figures(tmp_path: Path, monkeypatch) -> None:
    import reporting
    from runs import Mean

    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/one.py", "--write"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    body = reporting.table(("a", "b"), [(1, Mean(0.5, 0.01))])
    reporting.publish("one", "One", [body], write=False)
    assert not list(tmp_path.iterdir())
    reporting.publish("one", "One", [body], write=True, figures=[Mean(0.5, 0.01)])
    assert (tmp_path / "one.md").read_text() == (
        "# One\n\n`OMP_NUM_THREADS=1 python benchmarks/one.py --write`\n\n"
        "| a | b |\n|---|---|\n| 1 | +50.0 ± 1.0 |\n"
    )
    assert json.loads((tmp_path / "one.json").read_text()) == [{"value": 0.5, "error": 0.01}]


def test_what_was_made_once_is_kept(tmp_path: Path) -> None:
    from reporting import kept

    assert kept(tmp_path / "deep" / "a.json", lambda: {"x": 1}) == {"x": 1}
    assert kept(tmp_path / "deep" / "a.json", lambda: {"x": 2}) == {"x": 1}


def test_printed_sentences_are_wrapped_and_tables_are_not_touched() -> None:
    import example_ladder

    table = "│ never grow │    53.4 │\n└────────────┴─────────┘"
    sentence = "The policy is below the best rule. " * 6
    lines = example_ladder.wrapped(f"{table}   \n{sentence}\n\nend").splitlines()
    assert lines[:2] == table.splitlines()
    assert " ".join(lines[2:-2]) == sentence.strip()
    assert max(map(len, lines)) <= example_ladder.WIDTH
    assert lines[-2:] == ["", "end"]


def test_text_is_scored_on_test_with_student_intervals_and_validation_beside() -> None:
    import text

    draws = np.random.default_rng(0)
    levels = {"never": 20.0, "norm in r0c0": 30.0}
    found = {
        name: {
            split: {
                figure: draws.normal(level + more, 1.0, 3).tolist()
                for figure in ("utility", "gain", "accuracy", "bits")
            }
            for split, more in (("test", 0.0), ("validation", 50.0))
        }
        for name, level in levels.items()
    }
    heads, _, *rows = (line.strip("| ").split(" | ") for line in text.page(found).splitlines())
    assert [row[0] for row in rows] == ["norm in r0c0", "never"]
    for row in rows:
        own = found[row[0]]
        for figure, form in (("utility", ".1f"), ("gain", "+.1f"), ("bits", ".3f")):
            values = np.array(own["test"][figure])
            half = stats.t.ppf(0.975, 2) * stats.sem(values)
            mean, low, high = values.mean(), values.mean() - half, values.mean() + half
            cell = row[heads.index("bits per byte" if figure == "bits" else figure)]
            assert cell == f"{mean:{form}} [{low:{form}}, {high:{form}}]"
        beside = f"{np.mean(own['validation']['gain']):+.1f}"
        assert row[heads.index("gain on validation")] == beside
    assert "untuned: a learning rate of 0.003, constant" in text.recipe(find("text_gpt"))


def test_a_text_plan_is_scored_on_both_splits(monkeypatch) -> None:
    import text

    task = replace(find("text_bytes"), episode_length=16, max_batches=1, batch_size=2)
    chosen = dict(list(text.plans(task).items())[:2])
    monkeypatch.setattr(text, "plans", lambda task: chosen)
    found = text.schedules(task, 2)
    assert list(found) == ["never", "everything"]
    for split in ("test", "validation"):
        assert found["never"][split]["gain"] == pytest.approx([0.0, 0.0], abs=1e-4)
        assert max(found["everything"][split]["gain"]) < -1.0
    assert found["never"]["test"]["utility"] != found["never"]["validation"]["utility"]


def test_the_page_on_schedules_has_the_rows_that_are_measured() -> None:
    """What growing gains is not among them: it is measured against controls elsewhere."""
    import schedules

    class Flat:
        def metric(self, name: str) -> np.ndarray:
            return np.zeros(10)

    rows = [*schedules.measured(Flat())]
    page = (BENCHMARKS / "results" / "schedules.md").read_text().splitlines()
    written = [line.split(" | ")[0].strip("| ") for line in page if line.startswith("| ")]
    assert written[1:] == rows
    assert not [row for row in rows if "gain" in row]


def test_recipes_are_scored_by_what_never_growing_scores() -> None:
    import recipes

    tried = [Recipe(0.02, "cosine"), Recipe(0.05), Recipe(0.05, weight_decay=0.1)]
    task = replace(find("digits_shift"), episode_length=2, max_batches=3, batch_size=16)
    found = recipes.trained(task, tried, first=50, hosts=2)
    for r, recipe in enumerate(tried):
        for i, split in enumerate(recipes.SPLITS):
            one = recipe.on(task.with_split(split))
            hosts = Population((one, one), 50 + 2 * i, data_seed=recipes.ORDER)
            outcome = play(hosts, lambda env: NeverActor(), 1)
            # The validation score of an episode is a mean over its last steps.
            for name, row in zip(("test_score", "test_accuracy"), found[2:], strict=True):
                expected = getattr(outcome, name)[:, 0]
                np.testing.assert_allclose(row[r, 2 * i : 2 * i + 2], expected, atol=1e-6)


def test_the_least_loss_is_taken_or_the_best_accuracy_within_its_error() -> None:
    import recipes

    noise = 0.01 * np.random.default_rng(0).normal(size=(4, 50))
    losses = np.array([[0.1], [0.0], [0.0], [0.2]]) + noise
    accuracy = np.array([[0.9], [0.5], [0.6], [0.9]]) + np.zeros((4, 50))
    best = int(losses.mean(1).argmin())
    assert recipes.least(losses) == best
    assert recipes.least(losses, accuracy) == 2
    # An accuracy that is higher by chance does not count.
    chance = 0.5 + 0.01 * np.random.default_rng(1).normal(size=(4, 50))
    assert recipes.least(losses, chance) == best
    assert recipes.least(losses[::-1], accuracy[::-1]) == 1


def test_the_committed_recipes_are_those_of_their_figures() -> None:
    import recipes

    figures = json.loads((BENCHMARKS / "results" / "recipes.json").read_text())
    page = (BENCHMARKS / "results" / "recipes.md").read_text()
    for part in recipes.page(figures):
        assert part in page
    assert {
        name: msgspec.convert(found, TunedRecipes) for name, found in figures.items()
    } == read_tuned()


def test_the_rule_of_widening_is_what_the_page_learned_from_hosts_that_it_is_not_tried_on() -> None:
    import capacity_home
    import capacity_rules
    from capacity_plays import all_outcomes, further

    from esper.kasmina.width_prior import GAINS, planned_counts
    from esper.own_models.growth_result import price_of
    from esper_lab.capacity import hosts

    page = (BENCHMARKS / "results" / "capacity.md").read_text()
    rows = re.findall(r"^\| to (\d+) \|(.*) \|$", page, re.MULTILINE)
    assert [int(width) for width, _ in rows] == list(GAINS)
    for (_, cells), gains in zip(rows, GAINS.values(), strict=True):
        assert [float(cell) / 100 for cell in cells.split("|")] == pytest.approx(gains)
    # The rule of the study decides as the one that ships, for a host that it has played.
    host = replace(
        capacity_home.draw(0), architecture=hosts.perceptron, samples=100, width=6, epochs=2
    )
    host = replace(host, data=partial(capacity_home.clusters, 100, 0), samples=100, depth=2)
    played = all_outcomes(host)
    assert [len(order) for order in played["plans"]] == [12, 12]
    assert len(further(host)["short"]) == len(played["statics"]) == 5
    sizes = [plan["parameters"] for plan in played["statics"]]
    assert sizes == [plan["parameters"] for plan in played["plans"][0][:5]]
    data = host.data()
    model = host.build(data).eval()
    with torch.no_grad():
        groups, _ = channel_groups(model, lambda: model(data.x[:2]))
    lessons = [
        played | {"width": width, "plans": _plans_with(gains)} for width, gains in GAINS.items()
    ]
    choose = capacity_rules.lookup(lessons)
    for price in (0.0, 0.003, 0.01, 0.03, 0.1, 1.0):
        counts = planned_counts(model, groups, partial(price_of, price))
        factor = (1.0, 1.5, 2.0, 4.0, 8.0)[choose(played | {"price": price, "training_price": 0})]
        assert [counts.get(group, 0) for group in groups] == [round(6 * (factor - 1))] * 2


def _plans_with(gains: tuple[float, ...]) -> list[list[dict[str, float]]]:
    order = [{"test": gain, "parameters": 1, "operations": 1.0} for gain in (0.0, *gains)]
    return [order, order]


def test_what_learns_rules_of_widening_does_not_know_the_held_out_hosts() -> None:
    from esper_lab.capacity import hosts, training

    paths = [BENCHMARKS / f"capacity_{name}.py" for name in ("home", "rules", "plays", "looks")]
    for path in (*paths, *(Path(module.__file__) for module in (hosts, training))):
        tree = ast.parse(path.read_text())
        kinds = ast.Import | ast.ImportFrom
        imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        assert imports
        assert not any("held_out" in line or ".ladder" in line for line in imports)


def test_held_out_hosts_have_other_data_and_another_architecture() -> None:
    import capacity_home

    from esper_lab.capacity import held_out

    here, there = ([draw(i) for i in range(40)] for draw in (capacity_home.draw, held_out.draw))
    for members in (here, there):
        assert [host.trained for host in members] == [False, True] * 20
    assert not {host.data_name for host in here} & {host.data_name for host in there}
    kinds = [{host.architecture.__name__ for host in members} for members in (here, there)]
    assert kinds[1] - kinds[0] == {"reader"}
    assert len({host.seed for host in (*here, *there)}) == 80


def _invented_host(trained: bool, seed: int) -> dict[str, Any]:
    """A host whose trainings came to drawn scores."""
    draws = np.random.default_rng(seed)

    def row() -> list[dict[str, float]]:
        sizes = [round(100 * factor) for factor in (1, 1.5, 2, 4, 8)]
        scores = draws.uniform(0.2, 0.9, (5, 2))
        scores[3 if trained else 1] += 0.5  # what is best on the mean depends on the kind
        rows = zip(scores, sizes, strict=True)
        costs = draws.uniform(1.0, 9.0, 2).tolist()
        return [
            {"test": a, "validation": b, "parameters": size}
            | {"operations": costs[0] * size, "seconds": costs[1] * size}
            for (a, b), size in rows
        ]

    return {
        "outputs": 3, "samples": 100 + 50 * seed, "width": 2 + seed % 20, "depth": 1, "epochs": 10,
        "price": float(draws.uniform(0.003, 0.1)), "trained": trained, "parameters": 100,
        "training_price": float(draws.uniform(0.001, 0.1)), "operations": 250.0,
        "validation": float(draws.random()), "training": float(draws.random()),
        "plans": [row(), row()], "statics": row(), "short": row(),
        "never": row()[0] | {"operations": 250.0},
    }  # fmt: skip


def _worth(one: dict[str, float], host: dict[str, Any], split: str = "test") -> float:
    price = float(host["price"]) * math.log(one["parameters"] / 100)
    return one[split] - price - host["training_price"] * math.log(one["operations"] / 250)


def test_the_controls_of_widening_are_what_a_loop_over_hosts_says() -> None:
    from capacity_ladder import choices, control_rungs, in_time
    from capacity_rates import tuned, tuned_lesson

    from esper_lab import evaluation as names

    lessons = [_invented_host(bool(i % 2), 100 + i) for i in range(60)]
    fresh = [_invented_host(bool(i % 2), i) for i in range(10)]
    plans = choices(fresh, lessons)
    rungs = {rung.name: rung for rung in control_rungs(fresh, plans)}
    timed = {rung.name: rung for rung in control_rungs([*map(in_time, fresh)], plans)}
    assert list(rungs) == [
        names.NEVER_GROW, names.BEST_FIXED, names.LOOKUP, names.FOREST, names.STATIC_LOOKUP,
        *names.STATIC_SIZES, names.SHORT_SWEEP, names.SWEEP, names.CLAIRVOYANT,
    ]  # fmt: skip
    for i, host in enumerate(fresh):
        one, two = host["plans"]
        worth = [[_worth(order[k], host) for k in range(5)] for order in (one, two)]
        assert rungs[names.NEVER_GROW].utility[i] == pytest.approx(host["never"]["test"])
        for name in (names.BEST_FIXED, names.LOOKUP, names.FOREST):
            plan = rungs[name].chosen[i]
            assert rungs[name].utility[i] == pytest.approx((worth[0][plan] + worth[1][plan]) / 2)
            assert rungs[name].added[i] == (0, 50, 100, 300, 700)[plan]
        static = host["statics"][rungs[names.LOOKUP].chosen[i]]
        assert rungs[names.STATIC_LOOKUP].utility[i] == pytest.approx(_worth(static, host))
        for name, column in ((names.SHORT_SWEEP, "short"), (names.SWEEP, "statics")):
            total = sum(x["operations"] for x in host[column])
            paid = [x | {"operations": total} for x in host[column]]  # whichever is taken
            scores = [_worth(x, host, "validation") for x in paid]
            best = paid[scores.index(max(scores))]
            assert rungs[name].utility[i] == pytest.approx(_worth(best, host))
            assert rungs[name].operations[i] == pytest.approx(total)
        for k, name in enumerate(names.STATIC_SIZES, 1):
            assert rungs[name].operations[i] == host["statics"][k]["operations"]
            never = (one[0]["seconds"] + two[0]["seconds"]) / 2
            seconds = host["statics"][k]["seconds"]
            assert timed[name].operations[i] == pytest.approx(seconds / never)
        assert timed[names.NEVER_GROW].operations[i] == 1.0
        high = [x | {"validation": 2.0} for x in host["short"]]
        assert tuned(host, [host["short"], high], [host["never"]])["statics"] == high
        assert tuned_lesson(host, [host["short"], high])["plans"] == [high]
        places = [row.index(max(row)) for row in worth]
        crossed = (worth[1][places[0]] + worth[0][places[1]]) / 2
        assert rungs[names.CLAIRVOYANT].utility[i] == pytest.approx(crossed)
        assert rungs[names.CLAIRVOYANT].chosen[i] == places[0]
    for kind in (0, 1):  # a constant for hosts from scratch, and one for trained ones
        means = [
            np.mean([[_worth(order[k], host) for order in host["plans"]] for host in part])
            for part in [lessons[kind::2]]
            for k in range(5)
        ]
        assert set(rungs[names.BEST_FIXED].chosen[kind::2]) == {int(np.argmax(means))}


def test_the_card_of_widen_says_what_the_ladder_of_its_suite_says() -> None:
    from esper_lab import evaluation as names

    found = json.loads((BENCHMARKS / "results" / "capacity_ladder.json").read_text())
    card = " ".join((ROOT / "src/esper/policies/widen/card.md").read_text().split())
    told = re.findall(r"[+-][\d.]+ \[[+-][\d.]+, [+-][\d.]+\] (?:points )?above ([\w ]+)", card)
    assert len(told) == 6
    assert f"on {found['hosts']} further ones" in card
    order = names.NEVER_GROW, names.BEST_FIXED, names.LOOKUP, names.SHORT_SWEEP, names.SWEEP
    place = 0
    for name in order:
        place = card.index(points_text(found["widen_minus"][name]), place) + 1
    for name in (names.NEVER_GROW, names.SWEEP):
        place = card.index(points_text(found["tuned_minus"][name]), place) + 1


def test_static_networks_of_a_cost_are_between_the_sizes_beside_it() -> None:
    from widening_cost import envelope

    pairs = (20.0, 4.0), (10.0, 1.0), (9.0, 2.0)
    sizes = [[{"test": test + i, "seconds": cost} for i in (0.0, 2.0)] for test, cost in pairs]
    for cost, test in ((0.5, 10.0), (1.0, 10.0), (2.0, 15.0), (4.0, 20.0), (9.0, 20.0)):
        assert envelope(sizes, "seconds", cost) == pytest.approx([test, test + 2.0])
