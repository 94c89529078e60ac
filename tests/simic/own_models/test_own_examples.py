"""The examples run from start to end, as a user would run them, with fewer epochs."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.kasmina.grafts.attachment import grown_seeds
from own_modules import ResidualNet, images, loader

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("own_cnn", (8,)), ("own_transformer", (9, 2)), ("own_regression", (8,))],
)
def test_an_example_runs(
    name: str, arguments: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments)
    assert len(found.history) == arguments[0]
    assert found.seeds == {n: seed.blueprint for n, seed in grown_seeds(found.model).items()}
    assert f"epoch   {arguments[0]}/{arguments[0]}" in capsys.readouterr().out


def python_blocks(page: str, heading: str) -> list[str]:
    text = (ROOT / page).read_text().split(f"# {heading}\n")[1]
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_pages_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first = python_blocks("docs/own-models.md", "Grow a model of your own")[0]
    exec(first.replace("epochs=12", "epochs=4"), names)
    assert len(names["result"].history) == 4
    assert (tmp_path / "growth.svg").exists()

    names = {
        "model": ResidualNet(),
        "train_loader": loader(*images(32)),
        "validation_loader": loader(*images(32, 1)),
    }
    exec(python_blocks("README.md", "Your own model")[0].replace("=40", "=4"), names)
    assert names["result"].model is names["model"]


def test_the_loop_of_the_page_runs() -> None:
    model, data = ResidualNet(), loader(*images(32))
    calls: list[int] = []
    names: dict[str, Any] = {
        "model": model,
        "validate": lambda: calls.append(1) or 0.5,
        "train_one_epoch": lambda m, o: [m(x) for x, _ in data],
    }
    names |= {"esper": esper, "torch": torch}
    loop = python_blocks("docs/own-models.md", "In a loop of your own")[0]
    exec(loop.replace("40", "5"), names)
    assert len(names["growth"].history) == 5
    assert len(calls) >= 5
