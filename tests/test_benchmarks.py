"""Benchmarks and scripts: each can be imported and explains itself; pages come from the figures."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from esper.runtime.recipes import Recipe, Tuned, read_tuned
from esper.runtime.tasks import find
from esper.simic.evaluation.play import Population, play
from esper.tamiyo.baselines import NeverActor

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).glob("*.py")
    if "__main__" in path.read_text()
)


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a script of either folder is started."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("scripts", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


@pytest.mark.usefixtures("on_path", "scratch_register")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_imported_and_explains_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if path.name == "gym_speed.py":
        pytest.importorskip("sb3_contrib")
    module = importlib.import_module(path.stem)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 0
    first = module.__doc__.splitlines()[0]
    assert first in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("on_path")
def test_a_page_is_written_with_its_command_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.usefixtures("on_path")
def test_what_was_made_once_is_kept(tmp_path: Path) -> None:
    from reporting import kept

    assert kept(tmp_path / "deep" / "a.json", lambda: {"x": 1}) == {"x": 1}
    assert kept(tmp_path / "deep" / "a.json", lambda: {"x": 2}) == {"x": 1}


@pytest.mark.usefixtures("on_path")
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


@pytest.mark.usefixtures("on_path")
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


@pytest.mark.usefixtures("on_path")
def test_the_committed_recipes_are_those_of_their_figures() -> None:
    import recipes

    figures = json.loads((BENCHMARKS / "results" / "recipes.json").read_text())
    page = (BENCHMARKS / "results" / "recipes.md").read_text()
    for part in recipes.page(figures):
        assert part in page
    assert {name: msgspec.convert(found, Tuned) for name, found in figures.items()} == read_tuned()
