"""The outcome of a round against independent measurements of its hosts."""

import math
from pathlib import Path

import pytest
import torch

from esper.leyline.config import unflatten
from esper.leyline.events import EpisodeOutcome, Event, to_floats
from esper.nissa.hub import Hub
from esper.simic.training.growth_trainee import GrowthTrainee

LENGTH, ENVS, GROUP = 40, 6, 3


class Kept:
    """A sink that keeps the outcome."""

    def __init__(self) -> None:
        self.outcome: EpisodeOutcome | None = None

    def write(self, event: Event) -> None:
        if isinstance(event, EpisodeOutcome):
            self.outcome = event

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_test_scores_are_those_of_an_independent_measurement_of_the_final_hosts(
    tmp_path: Path,
) -> None:
    config = unflatten(
        {
            "envs": ENVS, "group_size": GROUP, "episode_length": LENGTH, "max_batches": 4,
            "batch_size": 32, "seed": 5, "threads": 1, "backend": "torch", "task": ["digits_shift"],
            "telemetry_dir": str(tmp_path),
        }
    )  # fmt: skip
    trainee = GrowthTrainee(config, "heuristic", [torch.device("cpu")])
    kept = Kept()
    hub = Hub([kept], "minimal")
    trainee.collect(hub, 1, lambda step: None)
    summary = trainee.finish(hub, 1, 1.0, {})
    hub.close()
    outcome = kept.outcome
    assert outcome is not None
    assert sum(outcome.fossilised) > 0

    (shard,) = trainee.environment.shards
    found = shard.engine.measure(shard.state, LENGTH - 1, committed=True, split="test").committed
    assert found is not None
    own, twin = slice(None, ENVS), ENVS + torch.arange(ENVS) // GROUP
    for told, measured, rows in (
        (outcome.test_accuracy, found.accuracy, own),
        (outcome.twin_test_accuracy, found.accuracy, twin),
        (outcome.test_expected_accuracy, found.expected, own),
        (outcome.twin_test_expected_accuracy, found.expected, twin),
        (outcome.twin_test_utility, found.expected, twin),
    ):
        assert to_floats(told) == pytest.approx(measured[rows].tolist(), abs=1e-6)
    rents = [0.05 * math.log(1.0 + added / 438) for added in outcome.added_parameters]
    expected = found.expected.tolist()
    gains = []
    for i, price in enumerate(rents):
        assert outcome.test_utility[i] == pytest.approx(expected[i] - price, abs=1e-6)
        gains.append(100.0 * (expected[i] - price - expected[ENVS + i // GROUP]))
    assert outcome.gain == pytest.approx(gains, abs=1e-4)
    assert summary.gain == pytest.approx(sum(gains) / ENVS, abs=1e-4)
    pairs = zip(outcome.utility, outcome.twin_utility, strict=True)
    assert outcome.validation_gain == pytest.approx([100.0 * (u - v) for u, v in pairs])
    assert outcome.gain != pytest.approx(outcome.validation_gain, abs=0.1)
