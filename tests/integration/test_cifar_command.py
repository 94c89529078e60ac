"""Training on CIFAR-10 as in a user's ticket, on small files, with and without a terminal."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from cifar_files import write_binary
from esper.karn.store import read_events
from esper.leyline.actions import HEADS
from esper.leyline.events import EpisodeOutcome, PPOUpdateCompleted, TrainingStarted
from esper.scripts.train import train
from karn.sanctum.test_acceptance import gradients
from processes import called

COMMAND = [
    "ppo", "--devices", "cpu", "cpu", "--telemetry-dir", "./telemetry", "--sanctum",
    "--telemetry-level", "debug", "--config-json", "config.json", "--gpu-preload", "--rounds", "2",
    "--envs", "2", "--experimental-gpu-preload-gather", "--task", "cifar_impaired",
]  # fmt: skip
TRAIN = [sys.executable, "-m", "esper.scripts.train"]
SETTINGS = {
    "n_envs": 64, "n_episodes": 100, "max_epochs": 5, "max_batches": 2, "batch_size": 8,
    "lr": 3e-4, "gamma": 1.0, "seed": 42, "slots": ["r0c1", "r1c2"], "lstm_hidden_dim": 16,
    "device": "cuda:0", "entropy_coef": 0.05,
}  # fmt: skip
"""Settings in such a user's file; the command line overrides the first two and the device."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_binary(tmp_path / "data")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def run_of(place: Path) -> Path:
    (events,) = (place / "telemetry").glob("*/events.jsonl")
    return events.parent


def assert_learned(run: Path) -> None:
    (started,) = read_events(run, TrainingStarted)
    assert started.tasks == ["cifar_impaired"]
    assert started.slots == [["r0c1", "r1c2"]]
    assert (started.envs, started.rounds, started.episode_length) == (2, 2, 5)
    assert started.device == "cpu cpu"
    updates = list(read_events(run, PPOUpdateCompleted))
    assert [update.round for update in updates] == [1, 2]
    for update in updates:
        norms = {n: v for n, v in update.metrics.items() if n.startswith("head_grad_norms/")}
        assert len(norms) == len(HEADS) + 1
        for name, norm in norms.items():
            assert isinstance(norm, int | float), name
            assert math.isfinite(norm), name
    assert [len(ended.utility) for ended in read_events(run, EpisodeOutcome)] == [2, 2]
    found = gradients(run, (80, 24))
    assert all(math.isfinite(float(norm)) for norm, _ in found.values()), found


@pytest.mark.parametrize("sanctum", [True, False])
def test_it_trains_and_every_head_has_a_finite_gradient_norm(place: Path, sanctum: bool) -> None:
    command = [word for word in COMMAND if sanctum or word != "--sanctum"]
    done = called(command, place, train)
    assert done.returncode == 0, done.stderr
    warnings = done.stderr.count("sanctum: needs a terminal; training without it")
    assert warnings == int(sanctum)
    assert_learned(run_of(place))


def test_on_a_terminal_sanctum_shows_the_training(place: Path, terminal) -> None:
    words = [*TRAIN, *COMMAND]
    script = f"import os, sys; os.chdir({str(place)!r}); os.execv({words[0]!r}, {words!r})"
    one = terminal(command=[sys.executable, "-c", script])
    one.until(lambda out: "■ finished".encode() in out)
    one.type("2")
    one.until(lambda out: b"gradient norm" in out)
    one.type("q")
    assert one.exit_status() == 0
    assert_learned(run_of(place))


PRIOR: dict[str, dict[str, Any]] = {
    "defaults": {"recurrent_n_epochs": 1, "value_warmup_batches": 10, "entropy_coef_min": 0.01},
    "baseline": {"entropy_coef": 0.1, "plateau_threshold": 0.4},
    "stable": {
        "n_episodes": 200, "clip_ratio": 0.1, "entropy_coef_start": 0.06, "n_envs": 4,
        "entropy_coef_end": 0.03, "entropy_anneal_episodes": 200,
    },
    "scale": {"entropy_coef": 0.08, "plateau_threshold": 0.35, "max_seeds": 2},
    "stories": {
        "entropy_anneal_rounds": 10, "improvement_threshold": 1.5, "sparse_reward_scale": 0.5,
        "reward_mode": "sparse",
    },
    "experiment": {
        "n_envs": 128, "gae_lambda": 0.95, "value_coef": 0.25, "max_grad_norm": 0.5,
        "entropy_coef_start": 0.15, "entropy_coef_end": 0.08, "entropy_anneal_episodes": 3000,
        "entropy_coef_per_head": {"op": 1.2, "slot": 1.2, "blueprint": 3.0, "tempo": 1.5},
        "auto_forward_g1": True, "auto_forward_g2": True, "auto_forward_g3": True,
    },
    "escrow": {"reward_mode": "escrow", "rent_host_params_floor": 200, "disable_pbrs": True},
    "basic": {"reward_mode": "basic_plus", "param_budget": 20_000, "basic_acc_delta_weight": 2.0},
    "simplified": {"reward_mode": "simplified", "permissive_gates": False, "compile_mode": "off"},
    "loss": {"reward_family": "loss", "chunk_length": 150, "gradient_telemetry_stride": 10,
             "ppo_updates_per_batch": 2, "disable_terminal_reward": True, "task": None},
}  # fmt: skip
"""Ten configurations of the prior system, written from its public fields and presets."""
FEW = ("defaults", "experiment", "loss")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in PRIOR]
)
def test_a_configuration_of_the_prior_system_trains(place: Path, name: str) -> None:
    sizes = {"max_epochs": 5, "max_batches": 2, "batch_size": 8, "lstm_hidden_dim": 16}
    given = PRIOR[name] | sizes | {"slots": ["r0c1", "r1c2"]}
    (place / "config.json").write_text(json.dumps(given))
    done = called([word for word in COMMAND if word != "--sanctum"], place, train)
    assert done.returncode == 0, done.stderr
    assert_learned(run_of(place))
    assert "op_head: None=0, NaN/Inf=0, Finite=4 (of 4 params)" in done.stderr


def test_missing_data_are_reported_in_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = called(COMMAND, tmp_path, train)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "esper tasks fetch cifar10" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
