"""Anomalies: each kind has a trace that causes it and one that does not."""

import math
from pathlib import Path

import pytest
import torch

from esper.karn.store import read_events
from esper.leyline.anomaly_kinds import KINDS, Thresholds
from esper.leyline.events import (
    AnalyticsSnapshot,
    AnomalyDetected,
    Number,
    PPOUpdateCompleted,
    encode,
    number,
)
from esper.simic.ppo import PPOAgent
from esper.simic.training.anomaly_detector import AnomalyDetector
from esper.simic.training.vectorized import train_ppo_vectorized

RECORDED = Path(__file__).parents[2] / "recorded"
BOUNDS = Thresholds()
CALM: dict[str, float | None] = {
    "ratio_max": 1.4, "ratio_min": 0.6, "value_loss": 0.5, "grad_norm": 1.0, "refused": 0.0,
    "head_entropy/op": 0.5, "head_entropy/style": 0.0, "head_grad_norms/op": 0.1,
    "explained_variance": math.nan,
}  # fmt: skip
"""An update without anomalies; the style head never had a choice."""
TINY = {
    "envs": 4, "group_size": 2, "episode_length": 6, "max_batches": 1, "batch_size": 8,
    "lstm_hidden": 16, "seed": 5, "threads": 1,
}  # fmt: skip


def snapshot(round_number: int, speed: float = 100.0, **fields: object) -> AnalyticsSnapshot:
    settings: dict = {
        "time": 0.0, "round": round_number, "amp_enabled": False, "amp_dtype": None,
        "learning_rate": 1e-3, "environment_steps_per_second": speed, "rollout_seconds": 1.0,
        "update_seconds": 1.0,
    }  # fmt: skip
    return AnalyticsSnapshot(**{**settings, **fields})


def update(round_number: int, metrics: dict[str, float | None]) -> PPOUpdateCompleted:
    encoded: dict[str, Number | None] = {
        name: None if value is None else number(value) for name, value in metrics.items()
    }
    return PPOUpdateCompleted(time=0.0, round=round_number, update=round_number, metrics=encoded)


def found(*rounds: dict[str, float | None], speed: list[float] | None = None) -> list[str]:
    """The detector's findings in a trace, each as ``round kind metric``."""
    detector = AnomalyDetector()
    anomalies: list[AnomalyDetected] = []
    for i, changes in enumerate(rounds, 1):
        seen = snapshot(i, speed[i - 1] if speed else 100.0)
        anomalies += detector.observe(update(i, CALM | changes), seen)
    return [f"{a.round} {a.kind} {a.metric}" for a in anomalies]


def observed(run: Path) -> list[AnomalyDetected]:
    """The detector's findings in the updates of a run."""
    detector = AnomalyDetector()
    pairs = zip(
        read_events(run, PPOUpdateCompleted), read_events(run, AnalyticsSnapshot), strict=True
    )
    return [anomaly for pair in pairs for anomaly in detector.observe(*pair)]


PROVOKED = {
    "ratio_explosion": ([{"ratio_max": 5.1}], ["1 ratio_explosion ratio_max"]),
    "ratio_collapse": ([{"ratio_min": 0.09}], ["1 ratio_collapse ratio_min"]),
    "value_collapse": ([{"value_loss": 5.1}] * 4, ["3 value_collapse value_loss"]),
    "entropy_collapse": (
        [{"head_entropy/op": 0.01, "head_choice/op": 0.5}] * 4,
        ["3 entropy_collapse head_entropy/op"],
    ),
    "entropy_collapse, share unknown": (
        [{"head_entropy/op": 0.01}] * 3, ["3 entropy_collapse head_entropy/op"],
    ),
    "entropy_collapse to nothing": (
        [{"head_entropy/op": 0.0, "head_choice/op": 0.5}] * 3,
        ["3 entropy_collapse head_entropy/op"],
    ),
    "gradient_drift up": ([{}] * 6 + [{"grad_norm": 100.0}] * 3, ["7 gradient_drift grad_norm"]),
    "gradient_drift down": ([{}] * 6 + [{"grad_norm": 0.01}] * 3, ["7 gradient_drift grad_norm"]),
    "no drift of a norm that is not 1": ([{"grad_norm": 5.0}] * 10, []),
    "an entropy above its bound": ([{"head_entropy/op": 0.03}] * 5, []),
    "entropy_collapse with little choice": (
        [{"head_entropy/op": 0.01, "head_choice/op": 0.007}] * 3,
        ["3 entropy_collapse head_entropy/op"],
    ),
    "gradient_vanishing": ([{"grad_norm": 1e-8}] * 3, ["3 gradient_vanishing grad_norm"]),
    "gradient_vanishing of a head": (
        [{"head_grad_norms/op": 0.0, "head_choice/op": 0.5}] * 3,
        ["3 gradient_vanishing head_grad_norms/op"],
    ),
    "not_finite": ([{"policy_loss": -math.inf}], ["1 not_finite policy_loss"]),
    "not_finite, refused": ([{"refused": 0.25}], ["1 not_finite refused"]),
    "missing_gradient": ([{"head_grad_norms/op": None}], ["1 missing_gradient head_grad_norms/op"]),
}  # fmt: skip

UNPROVOKED: dict[str, list[dict[str, float | None]]] = {
    "ratio at the bounds": [{"ratio_max": 5.0, "ratio_min": 0.1}],
    "value loss high for two updates": [{"value_loss": 50.0}] * 2 + [{}] + [{"value_loss": 50.0}],
    "entropy low for two updates": [{"head_entropy/op": 0.01}] * 2 + [{}] * 2,
    "forced decisions": [{"head_entropy/op": 0.0, "head_choice/op": 0.0}] * 5,
    "next to no free decision": [{"head_entropy/op": 1e-9, "head_choice/op": 0.001}] * 5,
    "forced, share unknown": [{"head_entropy/op": 0.0}] * 5,
    "gradient that wanders": [{"grad_norm": 2.0 ** (i % 3)} for i in range(20)],
    "gradient of a head without choice": [{"head_grad_norms/op": 0.0, "head_choice/op": 0.0}] * 5,
    "explained variance of constant returns": [{"explained_variance": -math.inf}] * 5,
    "no gradient for two updates": [{"grad_norm": 0.0}] * 2,
    "metrics nobody reported": [{"ratio_max": None, "grad_norm": None}] * 5,
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_trace_out_of_bounds_is_reported_once(name: str) -> None:
    rounds, expected = PROVOKED[name]
    assert found(*rounds) == expected


@pytest.mark.parametrize("name", UNPROVOKED)
def test_a_trace_within_bounds_is_not_reported(name: str) -> None:
    assert found(*UNPROVOKED[name]) == []


def test_throughput_is_compared_with_its_running_mean() -> None:
    steady = [10.0, *[100.0] * 6, 51.0, 100.0]
    assert found(*[{}] * 9, speed=steady) == []
    dropped = [10.0, *[100.0] * 6, 49.0, 49.0]
    metric = "environment_steps_per_second"
    assert found(*[{}] * 9, speed=dropped) == [f"8 throughput_drop {metric}"]


def test_an_anomaly_that_recurs_is_reported_again() -> None:
    wild: dict[str, float | None] = {"ratio_max": 9.0}
    metric = "ratio_explosion ratio_max"
    assert found(wild, wild, {}, wild) == [f"1 {metric}", f"4 {metric}"]


def test_every_kind_of_anomaly_is_tested() -> None:
    kinds = {finding.split()[1] for _, trace in PROVOKED.values() for finding in trace}
    assert kinds | {"throughput_drop"} == set(KINDS)


def test_an_anomaly_records_the_precision() -> None:
    policy = {"amp_policy": True, "amp_policy_dtype": "bfloat16", "amp_policy_scale": 8.0}
    seen = snapshot(3, amp_enabled=True, amp_dtype="float16", amp_scale=1024.0, **policy)
    anomalies = AnomalyDetector().observe(update(3, {"ratio_max": math.inf}), seen)
    assert [a.kind for a in anomalies] == ["not_finite", "ratio_explosion"]
    anomaly = anomalies[1]
    assert (anomaly.amp_enabled, anomaly.amp_dtype, anomaly.amp_scale) == (True, "float16", 1024.0)
    assert (anomaly.amp_policy_dtype, anomaly.amp_policy_scale) == ("bfloat16", 8.0)
    assert (anomaly.round, anomaly.value, anomaly.threshold) == (3, "Infinity", 5.0)
    assert b'"value":"Infinity"' in encode(anomaly)


def test_a_policy_that_does_not_learn_is_checked_for_throughput_only() -> None:
    assert AnomalyDetector().observe(None, snapshot(1)) == []


def test_the_recorded_runs_have_the_expected_anomalies() -> None:
    """Real runs: one healthy, one with a too large learning rate and, at the end, broken heads."""
    assert observed(RECORDED / "healthy") == []
    assert list(read_events(RECORDED / "healthy", AnomalyDetected)) == []
    recorded = [(a.kind, a.metric) for a in read_events(RECORDED / "anomalous", AnomalyDetected)]
    assert [(a.kind, a.metric) for a in observed(RECORDED / "anomalous")] == recorded
    assert {
        ("ratio_explosion", "ratio_max"),
        ("missing_gradient", "head_grad_norms/tempo"),
        ("not_finite", "head_grad_norms/style"),
        ("not_finite", "refused"),
    } <= set(recorded)


def test_a_diverging_critic_is_reported(tmp_path: Path) -> None:
    settings = {"learning_rate": 0.3, "target_kl": 1e30, "max_gradient_norm": 1e30}
    # Beside the baseline of a group the policy collapses before the critic.
    settings["group_baseline"] = False
    run = train_ppo_vectorized(telemetry_dir=str(tmp_path), rounds=7, **TINY, **settings).path
    assert {a.kind for a in read_events(run, AnomalyDetected)} & {
        "value_collapse",
        "ratio_explosion",
        "gradient_drift",
    }


def test_missing_and_nan_gradients_of_a_run_differ(tmp_path: Path, monkeypatch) -> None:
    learn = PPOAgent.update

    def broken(self, rollout):  # type: ignore[no-untyped-def]
        for parameter in self.policy.head_parameters("op"):
            parameter.requires_grad_(False)
        for parameter in self.policy.head_parameters("value"):
            parameter.register_hook(lambda gradient: gradient * torch.nan)
        return learn(self, rollout)

    monkeypatch.setattr(PPOAgent, "update", broken)
    run = train_ppo_vectorized(
        telemetry_dir=str(tmp_path), rounds=1, telemetry_level="minimal", **TINY
    ).path
    (seen,) = read_events(run, PPOUpdateCompleted)
    assert seen.metrics["head_grad_norms/op"] is None
    assert seen.metrics["head_grad_norms/value"] == "NaN"
    assert isinstance(seen.metrics["head_grad_norms/slot"], float)
    kinds = {(a.kind, a.metric) for a in read_events(run, AnomalyDetected)}
    assert ("missing_gradient", "head_grad_norms/op") in kinds
    assert ("not_finite", "head_grad_norms/value") in kinds
    assert ("missing_gradient", "head_grad_norms/value") not in kinds
