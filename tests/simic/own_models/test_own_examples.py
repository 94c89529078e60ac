"""The examples run from start to end, as a user would run them, with fewer epochs."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.kasmina.grafts.attachment import grown_seeds
from esper.tolaria.memory import forget_peak, peak_resident
from own_modules import ResidualNet, images, loader

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
MOST_BYTES = 6 * 2**30
"""Memory of a process that runs an example."""


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("own_cnn", (8,)),
        ("own_resnet", (5, 2)),
        ("own_transformer", (9, 2)),
        ("own_regression", (8,)),
        ("own_pretrained", (8, 2)),
    ],
)
def test_an_example_runs(
    name: str, arguments: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    forget_peak()
    found = example(name)["main"](*arguments)
    peak = peak_resident()
    assert peak is None or peak < MOST_BYTES
    assert len(found.history) == arguments[0]
    assert found.seeds == {n: seed.blueprint for n, seed in grown_seeds(found.model).items()}
    assert f"epoch   {arguments[0]}/{arguments[0]}" in capsys.readouterr().out


def fitted(policy: str | None, epochs: int, tmp_path: Path) -> Any:
    """The trainer after ``epochs``, with the example's callback unless the policy is None."""
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    names = example("own_lightning")
    lightning.seed_everything(0, verbose=False)
    (train, validation, _), module = names["loaders"](), names["Classifier"]()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[]
        if policy is None
        else [names["GrowthCallback"](policy, price=0.0, report=None)],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_train_batches=8,
    )
    trainer.fit(module, train, validation)
    return trainer


def test_lightning_trains_a_module_that_grows(tmp_path: Path) -> None:
    trainer = fitted("rule", 12, tmp_path)
    module, growth = trainer.lightning_module, trainer.callbacks[0].growth
    assert len(growth.history) == 12
    seeds = grown_seeds(module.model)
    assert growth.seeds == {name: seed.blueprint for name, seed in seeds.items()} != {}
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    for seed in seeds.values():
        assert {id(p) for p in seed.parameters()} <= trained
        assert float(seed.conv_light.conv.weight.detach().abs().sum()) > 0.0

    # Its checkpoint restores a new module.
    path = tmp_path / "grown.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=False)["state_dict"]
    again = type(module)()
    esper.load_grown(again, state)
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(again.model.eval()(x), module.model.eval()(x))


def test_without_growth_lightning_trains_as_without_the_callback(tmp_path: Path) -> None:
    alone, beside = (fitted(policy, 2, tmp_path).lightning_module for policy in (None, "never"))
    assert list(alone.state_dict()) == list(beside.state_dict())
    for name, value in alone.state_dict().items():
        assert torch.equal(beside.state_dict()[name], value), name


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
