"""Small runs and what is left of them: what the tests of simic's rooms share."""

import json
from pathlib import Path

import torch

SMALL = {
    "envs": 4, "group_size": 2, "episode_length": 3, "max_batches": 1, "batch_size": 8,
    "lstm_hidden": 8, "minibatches": 2, "threads": 1, "telemetry_level": "minimal",
}  # fmt: skip


def events_of(run: Path, *kinds: str) -> list[dict]:
    """What a run told, as a plain reader of JSON finds it; of some kinds, or all."""
    lines = (run / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if not kinds or event["event_type"] in kinds]


def timeless(run: Path) -> list[dict]:
    """What training told of steps, episodes and updates, without the time it told it."""
    kinds = ("EPOCH_COMPLETED", "PPO_UPDATE_COMPLETED", "EPISODE_OUTCOME", "GYM_EPISODES")
    return [{k: v for k, v in e.items() if k != "time"} for e in events_of(run, *kinds)]


def assert_same(a: object, b: object, where: str = "") -> None:
    """The same names with the same bits."""
    if isinstance(a, dict):
        assert isinstance(b, dict)
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    else:
        assert torch.equal(a, b), where


def tensors(parts) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in parts.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": x for inner, x in tensors(value).items()}
        else:
            found[name] = value
    return found
