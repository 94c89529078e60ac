"""A wheel built by `make wheel` runs the native backend without a compiler."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from esper.native import build, library
from support import needs_native

pytestmark = [needs_native, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

TEN_STEPS = """
import sys
from esper.native import build, library
build.cpu_features = lambda: frozenset(sys.argv[1:])
import torch
from esper.runtime.tasks import find
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tolaria.precision import Precision
config = GrowthConfig(seed=1, group_size=2, episode_length=10, max_batches=1, batch_size=16)
cpu = torch.device("cpu")
environment = GrowthEnv([find("digits_shift")], torch.arange(4), config, Precision("cpu"), cpu)
policy, observation = FactoredLSTM(16), environment.reset(0)
hidden = policy.initial_hidden(4)
for _ in range(10):
    actions, _, _, hidden = policy.act(observation, hidden, None)
    step = environment.step(actions)
    observation = step.observation
    assert step.report.scores.loss.isfinite().all()
assert step.done and environment.backend_name == "native"
print(library.library()._name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built by `make wheel`."""
    place = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(place)]
    environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
    subprocess.run([*command, str(ROOT)], env=environment, capture_output=True, check=True)
    (made,) = place.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel installed and the other packages of this environment."""
    place = tmp_path_factory.mktemp("machine")
    venv.create(place, with_pip=False)
    paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
        + ["--quiet", "--no-index", "--no-deps", str(wheel)],
        check=True,
    )
    (Path(paths["purelib"]) / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return place


@pytest.mark.parametrize("instructions", build.instruction_sets())
def test_ten_steps_without_a_compiler(installed: Path, instructions: str, tmp_path: Path) -> None:
    features = build.INSTRUCTION_SETS[instructions]
    run = subprocess.run(
        [str(installed / "bin" / "python"), "-c", TEN_STEPS, *features],
        # A PATH without g++.
        env={"PATH": str(installed / "bin"), build.CACHE_VARIABLE: str(tmp_path / "empty")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    loaded = Path(run.stdout.strip())
    assert loaded.is_relative_to(installed)
    assert loaded.name.startswith(f"{instructions}-")
    assert run.stderr == ""
    assert not (tmp_path / "empty").exists()


def test_wheel_is_platform_specific_but_works_with_any_python(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")


def test_the_wheel_ships_its_types_and_its_licence(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert "esper/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_shipped_machine_code_equals_a_local_build(installed: Path) -> None:
    """Equal code has equal speed."""
    best = build.instruction_sets()[0]
    (shipped,) = installed.rglob(f"esper/native/lib/{best}-*.so")
    assert not build.shipped_libraries()
    assert shipped.read_bytes() == Path(library.library()._name).read_bytes()
