"""Run directories as a process would leave them."""

import json
from pathlib import Path
from typing import Any

from esper.leyline.actions import HEADS
from esper.leyline.events import (
    SCHEMA_VERSION,
    AnalyticsSnapshot,
    EpisodeOutcome,
    EpochCompleted,
    Event,
    PPOUpdateCompleted,
    SeedStageChanged,
    TrainingFinished,
    TrainingStarted,
    encode,
)

STEPS = 6


def started(rounds: int = 3, envs: int = 4, **changed: Any) -> TrainingStarted:
    """A process begins."""
    settings: dict[str, Any] = {
        "time": 1000.0, "schema": SCHEMA_VERSION, "round": 0, "rounds": rounds, "tasks": ["a<b"],
        "policy": "ppo", "envs": envs, "group_size": 2, "episode_length": STEPS,
        "slots": [["r0c0", "r0c1"]], "host_parameters": [10], "device": "cpu",
        "amp_enabled": False,
    }  # fmt: skip
    return TrainingStarted(**settings | changed)


def outcome(number: int, envs: int = 4, **changed: Any) -> EpisodeOutcome:
    """A round is over; its gain is ``number`` points, ``10 (number - 1)`` on validation."""
    values: dict[str, Any] = {
        "time": 1000.0 + number, "round": number, "task": ["a<b"] * envs,
        "utility": [0.1 * number] * envs, "twin_utility": [0.1] * envs,
        "accuracy": [0.3 + 0.01 * number + 0.02 * e for e in range(envs)],
        "twin_accuracy": [0.3 + 0.02 * e for e in range(envs)],
        "expected_accuracy": [0.0] * envs, "twin_expected_accuracy": [0.0] * envs,
        "episode_return": [float(e) for e in range(envs)], "added_parameters": [4 * number] * envs,
        "germinated": [1] * envs, "fossilised": [1] * envs, "pruned": [0] * envs,
        "rolled_back": [0] * envs,
        "test_accuracy": [0.5] * envs, "twin_test_accuracy": [0.25] * envs,
        "test_expected_accuracy": [0.5] * envs, "twin_test_expected_accuracy": [0.25] * envs,
        "test_utility": [0.3 + 0.01 * number + 0.02 * e for e in range(envs)],
        "twin_test_utility": [0.3 + 0.02 * e for e in range(envs)],
    }  # fmt: skip
    return EpisodeOutcome(**values | changed)


def step(number: int, at: int, envs: int = 4) -> EpochCompleted:
    """One environment step."""
    curve = [0.1 * at / STEPS] * envs
    return EpochCompleted(
        time=1000.0 + number, round=number, step=at, train_loss=curve, train_accuracy=curve,
        validation_loss=curve, validation_accuracy=curve, expected_accuracy=curve,
        twin_validation_accuracy=curve, twin_expected_accuracy=curve, reward=curve,
        added_parameters=[0] * envs, op=[0] * envs, slot=[0] * envs, success=[True] * envs,
        stage=[[1, 1]] * envs, blueprint=[[0, 0]] * envs, alpha=[[0.0, 0.0]] * envs,
    )  # fmt: skip


def changed(
    number: int, at: int, stage: str, environment: int = 0, slot: int = 0, blueprint: str = "norm"
) -> SeedStageChanged:
    """One slot went to another stage."""
    return SeedStageChanged(
        time=1000.0 + number, round=number, step=at, environment=[environment], slot=[slot],
        blueprint=[blueprint], previous=["DORMANT"], stage=[stage],
    )  # fmt: skip


def update(number: int, **metrics: Any) -> PPOUpdateCompleted:
    """An update of the policy."""
    usual = {"policy_loss": 0.1 / number, "value_loss": 1.0 / number, "learning_rate": 1e-3}
    heads = {f"{kind}/{head}": 0.1 * number for kind in ("head_entropy", "head_grad_norms")
             for head in HEADS}  # fmt: skip
    return PPOUpdateCompleted(
        time=1000.0 + number, round=number, update=number, metrics=usual | heads | metrics
    )


def snapshot(number: int, **changed: Any) -> AnalyticsSnapshot:
    """Throughput of a round."""
    values: dict[str, Any] = {
        "time": 1000.0 + number, "round": number, "amp_enabled": False, "amp_dtype": None,
        "learning_rate": 1e-3, "environment_steps_per_second": 7.0 + number,
        "rollout_seconds": 1.0, "update_seconds": 0.5,
    }  # fmt: skip
    return AnalyticsSnapshot(**values | changed)


def finished(number: int, status: str = "finished", time: float | None = None) -> TrainingFinished:
    """The process ended."""
    when = 1001.0 + number if time is None else time
    return TrainingFinished(time=when, round=number, status=status)


def whole_round(number: int, envs: int = 4, learns: bool = True, **metrics: Any) -> list[Event]:
    """All events of a round in which one seed was fossilised."""
    lives = {1: "GERMINATED", 2: "TRAINING", 4: "BLENDING", 5: "HOLDING", 6: "FOSSILISED"}
    events: list[Event] = []
    for at in range(1, STEPS + 1):
        events.append(step(number, at, envs))
        if at in lives:
            events.append(changed(number, at, lives[at]))
    events.extend([update(number, **metrics)] if learns else [])
    return [*events, snapshot(number), outcome(number, envs)]


def write_run(place: Path, events: list[Event], **settings: Any) -> Path:
    """A run directory with these events."""
    place.mkdir(parents=True)
    usual = {"task": ["a<b"], "rounds": 3, "envs": 4, "learning_rate": 0.001}
    content = {"settings": usual | settings, "fingerprint": {"esper": "0", "command": ["esper"]}}
    (place / "config.json").write_text(json.dumps(content))
    (place / "events.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in events))
    (place / "lock").touch()
    return place


def recorded_run(place: Path, rounds: int = 3, envs: int = 4, learns: bool = True) -> Path:
    """A run of some whole rounds that finished."""
    events: list[Event] = [started(rounds, envs)]
    for number in range(1, rounds + 1):
        events += whole_round(number, envs, learns)
    return write_run(place, [*events, finished(rounds)])
