"""Hand-made events."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import run_directories
from esper.leyline.events import (
    AnalyticsSnapshot,
    EpisodeOutcome,
    EpochCompleted,
    Event,
    PPOUpdateCompleted,
    TrainingFinished,
    TrainingStarted,
    encode,
)
from esper.leyline.stages import Stage


def started(rounds: int = 3, time: float = 0.0, **changes: Any) -> TrainingStarted:
    fields = {
        "time": time, "schema": 3, "tasks": ["digits_shift"], "envs": 2, "episode_length": 4,
        "host_parameters": [438],
    }  # fmt: skip
    return run_directories.started(rounds, **fields | changes)


def step(round_number: int, number: int, time: float | None = None, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        name: [0.25, 0.5]
        for name in (
            "train_loss", "train_accuracy", "validation_loss", "validation_accuracy",
            "expected_accuracy", "twin_validation_accuracy", "twin_expected_accuracy", "reward",
        )
    }  # fmt: skip
    fields |= {
        "added_parameters": [0, 0], "op": [0, 0], "slot": [0, 0], "success": [True, True],
        "stage": [[Stage.DORMANT] * 2] * 2, "blueprint": [[0, 0]] * 2, "alpha": [[0.0, 0.0]] * 2,
    }  # fmt: skip
    when = round_number + number / 10 if time is None else time
    return EpochCompleted(time=when, round=round_number, step=number, **(fields | changes))


def outcome(round_number: int, accuracy: Sequence[float] = (0.5, 0.6)) -> EpisodeOutcome:
    rows = {
        name: [0.4] * len(accuracy)
        for name in (
            "utility", "twin_utility", "twin_accuracy", "expected_accuracy",
            "twin_expected_accuracy", "episode_return",
        )
    }  # fmt: skip
    counts = {
        name: [1] * len(accuracy)
        for name in ("added_parameters", "germinated", "fossilised", "pruned", "rolled_back")
    }
    return EpisodeOutcome(
        time=round_number + 0.9, round=round_number, task=["digits_shift"] * len(accuracy),
        accuracy=list(accuracy), **rows, **counts,
    )  # fmt: skip


def update(number: int, **metrics: Any) -> PPOUpdateCompleted:
    return PPOUpdateCompleted(
        time=number + 0.8, round=number, update=number, metrics={"policy_loss": 0.1, **metrics}
    )


def snapshot(number: int, seconds: float = 1.0) -> AnalyticsSnapshot:
    speed = {"environment_steps_per_second": 8.0, "update_seconds": 0.0}
    return run_directories.snapshot(number, time=number + 0.8, rollout_seconds=seconds, **speed)


def finished(number: int) -> TrainingFinished:
    return run_directories.finished(number, time=number + 1.0)


def a_round(number: int) -> list[Event]:
    return [*(step(number, i) for i in range(1, 5)), update(number), snapshot(number),
            outcome(number)]  # fmt: skip


def write(run: Path, events: Sequence[Event], more: bytes = b"") -> Path:
    """Write a run directory with these events, followed by the bytes ``more``."""
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text("{}")
    lines = b"".join(encode(event) + b"\n" for event in events)
    (run / "events.jsonl").write_bytes(lines + more)
    return run
