"""An algorithm registers itself: one module with its settings, and the command exists."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.config import LearnerConfig, unflatten
from esper.leyline.config.algorithm import Algorithm, AlgorithmConfig, register, unregister
from esper.leyline.config.setting import POSITIVE, setting
from esper.leyline.errors import UsageError
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.advantage import Estimates, GeneralisedEstimator


@dataclass(frozen=True)
class Louder:
    """Generalised advantages, multiplied."""

    plain: GeneralisedEstimator
    factor: float

    def estimate(self, *args: Any) -> Estimates:
        """See ``Estimator.estimate``."""
        estimates = self.plain.estimate(*args)
        return replace(estimates, advantages=self.factor * estimates.advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(AlgorithmConfig):
    """How the toy learns."""

    loudness: float = setting(2.0, POSITIVE)
    """Factor of all advantages."""

    def learner_arguments(self, learner: LearnerConfig) -> dict[str, Any]:
        """See ``AlgorithmConfig.learner_arguments``."""
        return {"estimator": Louder(GeneralisedEstimator.of(learner), self.loudness)}


TOY = Algorithm(
    name="toy", title="the toy", summary="Train by a toy.",
    description="Train by a toy, which multiplies advantages.", settings=ToyConfig,
    defaults={"minibatches": 2},
)  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The toy is an algorithm during the test."""
    register(TOY)
    yield
    unregister("toy")


def test_a_registered_algorithm_trains_by_the_command_of_its_name(tmp_path: Path) -> None:
    words = f"--name a --telemetry-dir {tmp_path} --loudness 3 --gym CartPole-v1 --rounds 1"
    more = "--envs 2 --rollout-steps 16"
    assert run_guarded(esper, ["train", "toy", *words.split(" "), *more.split(" ")]) == 0
    settings = json.loads((tmp_path / "a" / "config.json").read_text())["settings"]
    assert (settings["algorithm"], settings["loudness"], settings["minibatches"]) == ("toy", 3.0, 2)
    resume = ["train", "toy", "--resume", str(tmp_path / "a"), "--rounds", "2"]
    assert run_guarded(esper, resume) == 0


def test_help_and_completion_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(esper, ["train", "--help"]) == 0
    assert "toy         Train by a toy." in capsys.readouterr().out
    assert run_guarded(esper, ["train", "toy", "--help-all"]) == 0
    assert "Factor of all advantages." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loudness": 1.0}, "loudness: belongs to the toy; train with esper train toy"),
        ({"algorithm": "toy", "lag": 1}, "lag: belongs to IMPALA"),
        ({"algorithm": "tie"}, "algorithm: must be one of 'ppo', "),
    ],
)
def test_its_settings_are_its_own(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        unflatten(settings)


COMMAND = "from esper_growth import main; exit(main())"


def test_the_algorithm_of_another_package_is_a_command(tmp_path: Path) -> None:
    """The example of docs/extending.md, as an installed package."""
    source = Path(__file__).parents[3] / "examples" / "own_algorithm.py"
    assert len(source.read_text().splitlines()) <= 60
    (tmp_path / source.name).write_text(source.read_text())
    metadata = tmp_path / "own_algorithm-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-algorithm\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[esper.algorithms]\nranks = own_algorithm\n")
    words = "train ranks --gym CartPole-v1 --spread 0.5 --rounds 1 --envs 2 --name a"
    done = subprocess.run(
        [
            sys.executable, "-c", "from esper_growth import main; exit(main())", *words.split(" "),
            "--telemetry-dir", str(tmp_path),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "a" / "config.json").read_text())["settings"]
    assert (settings["algorithm"], settings["spread"]) == ("ranks", 0.5)
