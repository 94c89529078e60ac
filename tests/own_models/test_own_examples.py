"""The examples run from start to end, as a user would run them, with fewer epochs."""

import json
import re
import runpy
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import swa_utils

import esper
from esper.leyline.errors import UsageError
from esper.own_models.attachment import grown_seeds
from esper.scripts.grown_files import export, outputs
from esper.tamiyo import try_and_keep
from esper.tamiyo.policy.features import Observation
from esper.tolaria.export import onnx_bytes, pt2_bytes
from esper.tolaria.memory import forget_peak, peak_resident
from own_modules import ResidualNet, images, loader
from processes import ran

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MAX_BYTES = 6 * 2**30
"""Memory of a process that runs an example, or loads what one grew."""
TOLERANCE = 1e-5
LOADER = Path(__file__).with_name("load_without_esper.py")

BUILDS = {
    "own_cnn": ("Net()", (8,)),
    "own_resnet": ("ResNet18(2, inputs=1, classes=10)", (8, 2)),
    "own_transformer": ("Model(text()[2])", (9, 2)),
    "own_regression": ("perceptron()", (12,)),
    "own_pretrained": ("network()", (8, 2)),
    "own_lightning": ("Classifier().model", (12,)),
}
"""How each example builds its model, and arguments of its ``main``."""


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@dataclass(frozen=True)
class Grown:
    """What an example left.

    Attributes:
        found: what ``main`` returned: a ``GrowthResult`` or a ``Growth``.
        batch: inputs and targets of its validation.
        printed: its output.
        peak: bytes that it took; None where the system does not tell.
        trainer: of Lightning, else None.
    """

    found: Any
    batch: tuple[Tensor, Tensor]
    printed: str
    peak: int | None
    trainer: Any = None


@cache
def grown(name: str) -> Grown:
    """Run an example once per process, with few epochs, in which every seed counts as worth it."""
    if name == "own_lightning":
        pytest.importorskip("lightning", reason="Lightning is not installed")
    forget_peak()
    printed, trainer = StringIO(), None
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(try_and_keep, "seed_worth", certain_worth)
        names = example(name)
        if name == "own_lightning":
            trainer = fitted("rule", *BUILDS[name][1], names)
            found = trainer.callbacks[0].growth
        else:
            found = names["main"](*BUILDS[name][1])
    return Grown(found, batch_of(names), printed.getvalue(), peak_resident(), trainer)


def certain_worth(observation: Observation) -> Tensor:
    """In so few epochs chance decides which seed contributes; here each whose effect is known."""
    known = try_and_keep.feature(observation, "contribution_known") > 0.0
    return torch.where(known, 1.0, -torch.inf)


def batch_of(names: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A batch of the example's validation data."""
    if "text" in names:
        return names["windows"](names["text"]()[1], range(12))
    loaders = names["loaders"](shift=2) if "pretrained" in names else names["loaders"]()
    inputs, targets = next(iter(loaders[1]))
    return inputs, targets


@pytest.mark.parametrize("name", BUILDS)
def test_an_example_runs_and_its_model_grows(name: str) -> None:
    left, (epochs, *_) = grown(name), BUILDS[name][1]
    assert left.peak is None or left.peak < MAX_BYTES
    assert len(left.found.history) == epochs
    seeds = {point: seed.blueprint for point, seed in grown_seeds(left.found.model).items()}
    assert left.found.seeds == seeds != {}
    assert f"epoch  {epochs:>2}/{epochs}" in left.printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_what_the_examples_grew_loads_and_trains_on_without_esper(
    kind: str, tmp_path: Path
) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    arguments = []
    for name, (build, _) in BUILDS.items():
        if name == "own_lightning" and find_spec("lightning") is None:
            continue
        found, (inputs, targets) = grown(name).found, grown(name).batch
        folder = found.save(tmp_path / name)
        torch.save((inputs, targets, outputs(found.model, inputs)), folder / "batch.pt")
        exported = export(found.model, inputs)
        assert exported.batch_size is None
        write = pt2_bytes if kind == "pt2" else partial(onnx_bytes, inputs=None, outputs=None)
        content = write(exported.program)
        (folder / f"model.{kind}").write_bytes(content)
        arguments += [str(EXAMPLES / f"{name}.py"), build, str(folder)]
    command = [sys.executable, "-W", "ignore", str(LOADER), *arguments]
    done = ran(command, tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["imported"] == []
    assert told["peak"] is None or told["peak"] * 1024 < MAX_BYTES
    assert list(told["seen"]) == arguments[2::3]
    for folder, seen in told["seen"].items():
        assert set(seen["differences"]) == {"rebuilt", kind}
        assert max(seen["differences"].values()) <= TOLERANCE, (folder, seen["differences"])
        before, after = seen["losses"]
        assert 0.0 < after != before, (folder, seen["losses"])
        assert seen["without gradient"] == [], folder
        assert any(".seed." in name for name in seen["moved"]), folder


def test_growth_writes_no_files_while_seeds_may_still_be_removed(tmp_path: Path) -> None:
    model = ResidualNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growth = esper.Growth(model, optimizer, policy="never", epochs=2, report=None)
    growth.step(0.5)
    with pytest.raises(UsageError, match=r"save: 1 of 2 epochs are over; call finish\(\) first"):
        growth.save(tmp_path / "early")
    assert not (tmp_path / "early").exists()
    growth.finish()
    written = {path.name for path in growth.save(tmp_path / "saved").iterdir()}
    assert written == {"state_dict.pt", "rebuild.py"}


def fitted(policy: str | None, epochs: int, names: dict[str, Any] | None = None) -> Any:
    """The trainer after ``epochs``, with the example's callback unless the policy is None."""
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    names = example("own_lightning") if names is None else names
    lightning.seed_everything(0, verbose=False)
    (train, validation, _), module = names["loaders"](), names["Classifier"]()
    callbacks = [] if policy is None else [names["GrowthCallback"](policy)]
    if policy == "widen":
        callbacks = [names["WideningCallback"]()]
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_train_batches=8,
    )  # fmt: skip
    trainer.fit(module, train, validation)
    return trainer


def test_lightning_trains_a_module_that_grows(tmp_path: Path) -> None:
    trainer = grown("own_lightning").trainer
    module = trainer.lightning_module
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    for seed in grown_seeds(module.model).values():
        assert {id(p) for p in seed.parameters()} <= trained
        assert float(seed.conv_light.conv.weight.detach().abs().sum()) > 0.0

    wide = fitted("widen", 2).lightning_module
    assert wide.model[0].out_channels > type(module)().model[0].out_channels
    # A checkpoint restores a new module.
    path = tmp_path / "grown.ckpt"
    for each in (module, wide):
        each.trainer.save_checkpoint(path)
        state = torch.load(path, weights_only=False)["state_dict"]
        again = esper.load_grown(type(each)(), state)
        x = torch.rand(5, 1, 8, 8)
        assert torch.equal(again.model.eval()(x), each.model.eval()(x))


def test_without_growth_lightning_trains_as_without_the_callback() -> None:
    alone, beside = (fitted(policy, 2).lightning_module for policy in (None, "never"))
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


def test_the_loops_of_the_page_run() -> None:
    model, data = ResidualNet(), loader(*images(32))
    calls: list[int] = []
    names: dict[str, Any] = {
        "model": model,
        "validate": lambda: calls.append(1) or 0.5,
        "train_one_epoch": lambda m, o: [m(x) for x, _ in data],
    }
    names |= {
        "esper": esper,
        "torch": torch,
        "train_loader": data,
        "ema": swa_utils.AveragedModel(model),
    }
    names["optimizer"] = torch.optim.SGD(model.parameters())
    size = sum(p.numel() for p in model.parameters())
    for loop in python_blocks("docs/own-models.md", "In a loop of your own")[:2]:
        exec(loop.replace("40", "5"), names)
    assert size < names["growth"].history[0].parameters
    assert len(names["growth"].history) == 5
    assert len(calls) >= 5
