"""A blueprint in a file of the user's own trains, grows, is exported and loaded as any other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.blueprints import of_family
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError
from esper.runtime import plugins
from esper.runtime.gate import Permission
from esper.scripts.grow import grow
from esper.simic.training.vectorized import train_ppo_vectorized
from own_modules import ResidualNet, images, loader
from processes import ran_python
from small_runs import SMALL, events_of
from support import own_blueprints

TESTS = Path(__file__).parent
NAME = "wide_kernel"
EXTENDING = (TESTS.parent / "docs" / "extending.md").read_text()
TASK = f"""
from dataclasses import replace
from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime.tasks import find, task

@task
def wide_digits():
    host = CnnHost((4, 8), 10, (8, 8, 1), seeds=({NAME!r},))
    return replace(find("digits_shift"), name="wide_digits", host=host, max_batches=2)
"""
MODEL = """
from own_modules import ResidualNet, images, loader

def model():
    return ResidualNet(dropout=0.0)

def loaders():
    return loader(*images(48)), loader(*images(32, 1))
"""
REBUILD = """
import sys
sys.modules["esper"] = None
import torch
from own_modules import ResidualNet
sys.path.insert(0, sys.argv[1])
from rebuild import rebuild
model = rebuild(ResidualNet(dropout=0.0), sys.argv[1] + "/state_dict.pt").eval()
kept = torch.load(sys.argv[1] + "/expected.pt", weights_only=True)
torch.testing.assert_close(model(kept["x"]), kept["out"], rtol=1e-5, atol=1e-5)
model.train()(kept["x"]).sum().backward()
print(sorted(n for n, p in model.named_parameters() if ".seed." in n and p.grad is not None))
"""

pytestmark = pytest.mark.usefixtures("scratch_register")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch) -> Iterator[str]:
    """The file of the documented blueprint, with a task that accepts no other."""
    monkeypatch.chdir(tmp_path)
    section = EXTENDING.split("\n## A blueprint\n")[1]
    source = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    path = tmp_path / f"{NAME}.py"
    path.write_text(source[1] + TASK)
    with own_blueprints():
        yield str(path)


def planted(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the first layer of each seed."""
    return {n: p for n, p in model.named_parameters() if n.endswith(f"seed.{NAME}.spread.weight")}


def test_it_is_trained_on(plugin: str, tmp_path: Path) -> None:
    sizes = SMALL | {"envs": 16, "episode_length": 24, "rounds": 1, "telemetry_level": "debug"}
    place = str(tmp_path / "runs")
    run = train_ppo_vectorized(plugin=(plugin,), task="wide_digits", telemetry_dir=place, **sizes)
    names = [k for e in events_of(run.path, "SEED_GERMINATED") for k in e["blueprint"]]
    assert set(names) == {NAME}


def test_it_grows_a_module_and_is_loaded_again_with_esper_and_without(
    plugin: str, tmp_path: Path
) -> None:
    plugins.load(plugin, Permission((plugin,)))
    torch.manual_seed(0)
    model = ResidualNet(dropout=0.0)
    result = esper.grow(
        model, loader(*images(48)), loader(*images(32, 1)), policy="rule", epochs=16, price=0.0
    )
    assert set(result.seeds.values()) == {NAME}
    assert planted(model)
    folder, x = result.save(tmp_path / "grown"), images(5, 9)[0]
    with torch.no_grad():
        expected = model.eval()(x)
    state = torch.load(folder / "state_dict.pt", weights_only=True)
    again = esper.load_grown(ResidualNet(dropout=0.0), state).eval()
    torch.testing.assert_close(again(x), expected, rtol=0, atol=0)
    torch.save({"x": x, "out": expected}, folder / "expected.pt")
    done = ran_python(REBUILD, str(folder), PYTHONPATH=str(TESTS))
    names = [f"{seed}.seed.{NAME}.{p}.weight" for seed in result.seeds for p in ("mix", "spread")]
    assert done.stdout.strip() == str(sorted(names)), done.stderr
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), expected, rtol=1e-5, atol=1e-5)
    with own_blueprints():
        BLUEPRINTS.remove(NAME)
        from esper.kasmina.blueprints import BUILDERS

        del BUILDERS[NAME]
        with pytest.raises(UsageError, match=r"the plugin that defines the blueprint"):
            esper.load_grown(ResidualNet(dropout=0.0), state)


def test_the_command_grows_a_host_of_a_task_with_it(plugin: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "model.pt2"
    command = ["--task", "wide_digits", "--plugin", plugin, "--policy", "rule", "--out", str(out)]
    assert grow(command) == 0
    assert re.search(rf"r0c0: {NAME} germinates", capsys.readouterr().out)
    module = torch.export.load(out).module()
    assert module(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_the_command_grows_a_model_with_it(plugin: str, tmp_path: Path, capsys) -> None:
    mine, out = tmp_path / "mine.py", tmp_path / "out"
    mine.write_text(MODEL)
    flags = ["--plugin", plugin, "--policy", "rule", "--epochs", "16", "--price", "0", "--keep"]
    assert grow(["--model", str(mine), *flags, "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    assert set(result["seeds"].values()) == {NAME}
    program = torch.export.load(out / "model.pt2").module()
    assert program(images(3)[0]).shape == (3, 4)
    assert f"def {NAME}(" in (out / "rebuild.py").read_text()


def test_a_module_offers_what_the_registry_holds(plugin: str) -> None:
    before = of_family("conv")
    plugins.load(plugin, Permission((plugin,)))
    assert of_family("conv") == (*before, BLUEPRINTS.index(NAME))
