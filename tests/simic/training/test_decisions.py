"""Recorded decisions equal what the policy computed."""

import math
from pathlib import Path

import pytest

from esper.karn.store import read_events
from esper.leyline.actions import HEADS, Op
from esper.leyline.config import unflatten
from esper.leyline.events import (
    DecisionsMade,
    EpisodeOutcome,
    EpisodeStarted,
    EpochCompleted,
    TrainingFinished,
)
from esper.simic.ppo import PPOAgent
from esper.simic.training.vectorized import run_training
from small_runs import SMALL

TINY = SMALL | {"episode_length": 6, "seed": 5, "rounds": 1, "telemetry_level": "normal"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two rounds of three tasks; a high entropy weight makes the policy try things."""
    settings = {
        "task": ["digits_shift", "digits", "digits_mlp"], "envs": 6, "rounds": 2, "entropy": 2.0,
        "learning_rate": 0.02, "target_kl": 1.0, "telemetry_dir": str(tmp_path_factory.mktemp("r")),
    }  # fmt: skip
    return run_training(unflatten(TINY | settings), "ppo").path


def test_probabilities_agree_with_the_log_prob_of_the_action(run: Path) -> None:
    """For WAIT, the op is the whole action, so both are the same number."""
    waits, ops = 0, set()
    for event in read_events(run, DecisionsMade):
        for actions, legal, probability, log_prob in zip(
            event.actions, event.legal_ops, event.op_probability, event.log_prob, strict=True
        ):
            known = list(map(float, probability))
            assert sum(known) == pytest.approx(1.0, abs=1e-4)
            assert all(p == 0.0 for op, p in enumerate(known) if op not in legal)
            assert actions[0] in legal
            assert math.exp(float(log_prob)) <= known[actions[0]] + 2e-5
            ops.add(actions[0])
            if actions[0] == Op.WAIT:
                waits += 1
                assert math.exp(float(log_prob)) == pytest.approx(known[Op.WAIT], abs=2e-5)
    assert waits > 20
    assert len(ops) > 2


def test_decisions_are_recorded_with_their_step(run: Path) -> None:
    pairs = zip(read_events(run, DecisionsMade), read_events(run, EpochCompleted), strict=True)
    for decided, done in pairs:
        assert (decided.round, decided.step) == (done.round, done.step)
        assert [a[HEADS.index("op")] for a in decided.actions] == done.op
        assert [a[HEADS.index("slot")] for a in decided.actions] == done.slot


def test_controls_record_no_probabilities(tmp_path: Path) -> None:
    run = run_training(unflatten({**TINY, "telemetry_dir": str(tmp_path)}), "random").path
    for event in read_events(run, DecisionsMade):
        assert event.op_probability == [[]] * 4
        assert len(event.actions) == len(event.legal_ops) == len(event.value) == 4


def test_the_start_of_a_round_records_its_tasks(run: Path) -> None:
    started = list(read_events(run, EpisodeStarted))
    outcomes = list(read_events(run, EpisodeOutcome))
    assert [(s.round, s.task) for s in started] == [(o.round, o.task) for o in outcomes]
    sizes = {"digits": 1442, "digits_shift": 438, "digits_mlp": 1514}
    for event in started:
        assert event.host_parameters == [sizes[task] for task in event.task]


def test_a_run_that_fails_records_the_error(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PPOAgent, "update", fail)
    with pytest.raises(RuntimeError):
        run_training(unflatten({**TINY, "telemetry_dir": str(tmp_path)}), "ppo")
    (run,) = tmp_path.iterdir()
    (end,) = read_events(run, TrainingFinished)
    assert (end.round, end.status) == (0, "failed")
    assert "out of memory" in (end.message or "")
