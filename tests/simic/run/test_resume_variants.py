"""A resumed run ends in the same bits as an uninterrupted one, for all kinds of settings."""

import pytest

from esper.simic.run.checkpoint import load_latest
from esper.simic.training.vectorized import resume_ppo, train_ppo_vectorized
from small_runs import SMALL, assert_same, events_of, timeless

VARIANTS = {
    "plain": {},
    "schedules": {
        "lr_warmup_frac": 0.5, "lr_decay": "cosine", "lr_decay_steps": 6, "entropy_decay": "linear",
        "entropy_decay_steps": 6, "clip_decay": "step", "clip_decay_steps": 6,
        "value_warmup_steps": 3, "entropy_per_head": ["op=2"], "value_learning_rate": 3e-3,
    },
    "adaptive": {"lr_adaptive_kl": 1e-4},
    "scaled": {"use_amp": True, "amp_dtype": "float16", "backend": "torch"},
    "half policy": {"amp_policy": True},
    "several tasks": {"task": ["digits", "digits_mlp"], "backend": "torch"},
}  # fmt: skip

EFFECTS = {
    "scaled": lambda parts: parts["environment"]["scale"].numel() > 0,
    "adaptive": lambda parts: parts["counters"]["rate_factor"].item() != 1.0,
}
"""What a variant's state must be; otherwise the runs would be equal because it has no effect."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_ends_in_the_same_bits(variant: str, tmp_path) -> None:
    settings = SMALL | VARIANTS[variant]
    whole = train_ppo_vectorized(rounds=3, telemetry_dir=str(tmp_path / "whole"), **settings)
    cut = train_ppo_vectorized(rounds=2, telemetry_dir=str(tmp_path / "cut"), **settings)
    stored = load_latest(cut.path).parts
    assert EFFECTS.get(variant, bool)(stored)
    resumed = resume_ppo(cut.path, {"rounds": 3})
    assert (resumed.path, len(resumed.rounds)) == (cut.path, 1)
    assert_same(load_latest(cut.path).parts, load_latest(whole.path).parts)
    assert timeless(cut.path) == timeless(whole.path)
    assert len(events_of(cut.path, "PPO_UPDATE_COMPLETED")) == 3
