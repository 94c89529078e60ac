"""Tuned networks that do not grow, and the table of recipes behind them."""

from dataclasses import replace

import msgspec
import pytest

from esper.runtime.tasks import SUITES, find
from esper_lab.baselines import GROWN, Recipe, read_tuned, static_network, tuned_twin

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
