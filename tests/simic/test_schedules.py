"""Schedules as pure functions of the update index, and the learner's use of them."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.config import LearnerConfig, TrainConfig, check, unflatten
from esper.leyline.config.reading import with_horizons
from esper.leyline.errors import UsageError
from esper.simic.growth.agent import growth_agent
from esper.simic.loss import ppo_loss, weighted_mean
from esper.simic.schedules import AdaptiveRate, Schedule, Schedules, warmup_updates
from esper.simic.training.run_lines import schedule_ends
from esper.tamiyo.policy.interface import Evaluation
from synthetic import CPU, synthetic_rollout

UPDATES = 40


def torch_trace(scheduler_of, updates: int = UPDATES) -> list[float]:
    """The learning rates of a torch scheduler that starts at 2."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = scheduler_of(optimizer)
    trace = []
    for _ in range(updates):
        trace.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return trace


def trace_of(schedule: Schedule, updates: int = UPDATES) -> list[float]:
    return [schedule.at(update) for update in range(updates)]


def test_linear_and_cosine_equal_those_of_torch_up_to_their_horizon() -> None:
    lr = torch.optim.lr_scheduler
    linear = torch_trace(lambda o: lr.LinearLR(o, 1.0, 0.1, total_iters=30))
    assert trace_of(Schedule(2.0, 0, "linear", 30, 0.1)) == pytest.approx(linear)
    cosine = torch_trace(lambda o: lr.CosineAnnealingLR(o, 30, eta_min=0.2), 31)
    assert trace_of(Schedule(2.0, 0, "cosine", 30, 0.1), 31) == pytest.approx(cosine)


def test_stairs_fall_by_equal_factors() -> None:
    """Three stairs of ten updates from 2 to 0.25: each halves the value."""
    stairs = torch_trace(lambda o: torch.optim.lr_scheduler.StepLR(o, 10, 0.5))
    assert trace_of(Schedule(2.0, 0, "step", 30, 0.125, 10)) == pytest.approx(stairs)


def test_the_warmup_rises_linearly_and_the_decay_follows_it() -> None:
    schedule = Schedule(1.0, 4, "linear", 14, 0.0 + 1e-9)
    assert trace_of(schedule, 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert schedule.at(9) == pytest.approx(0.5)


@given(
    st.sampled_from(["none", "linear", "cosine", "step"]),
    st.integers(0, 20),
    st.integers(1, 60),
    st.floats(0.01, 1.0),
    st.integers(1, 30),
)
def test_every_schedule_stays_in_bounds_and_keeps_its_end_value(
    decay: str, warmup: int, horizon: int, end: float, step_size: int
) -> None:
    schedule = Schedule(3.0, warmup, decay, horizon, end, step_size)
    trace = trace_of(schedule, 120)
    assert all(0.0 < value <= 3.0 * (1 + 1e-9) for value in trace)
    behind = trace[warmup:]
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(behind))
    last = 3.0 if decay == "none" else 3.0 * end
    assert trace[max(horizon, warmup + 1)] == pytest.approx(last)
    assert trace[-1] == pytest.approx(last)


def test_the_default_is_constant() -> None:
    schedules = Schedules.of(LearnerConfig())
    for name in ("policy_rate", "value_rate", "entropy", "clip"):
        trace = trace_of(getattr(schedules, name))
        assert len(set(trace)) == 1


def test_a_schedule_without_an_end_ends_with_the_rounds_of_the_first_start() -> None:
    asked = {"lr_decay": "cosine", "lr_warmup_frac": 0.1, "clip_decay_steps": 7, "rounds": 80}
    config = with_horizons(unflatten(asked))
    learner = config.learner
    ends = learner.lr_decay_steps, learner.clip_decay_steps, learner.entropy_decay_steps
    assert ends == (80, 7, 80)
    assert warmup_updates(learner) == 8
    assert schedule_ends(learner) == ["learning rate: 0.001 becomes 0.0001 by update 80 (cosine)"]
    # A run that is extended later keeps its schedule.
    longer = unflatten({"rounds": 500}, config)
    assert with_horizons(longer).learner == learner


def test_the_weight_of_the_value_loss_warms_up() -> None:
    config = LearnerConfig(value_weight=0.5, value_warmup_steps=4, value_start_factor=0.2)
    assert [config.value_weight_at(update) for update in (0, 2, 4, 9)] == pytest.approx(
        [0.1, 0.3, 0.5, 0.5]
    )
    assert schedule_ends(config) == ["value weight: 0.1 becomes 0.5 by update 4"]
    summaries, _ = learned(3, value_warmup_steps=2, value_weight=1.0)
    assert [s["value_loss_weight"] for s in summaries] == pytest.approx([0.1, 0.55, 1.0])
    unchanged, _ = learned(1)
    assert "value_loss_weight" not in unchanged[0]


def test_heads_have_entropy_weights_of_their_own() -> None:
    """The gradient of the bonus is that of autograd over the weighted sum of entropies."""
    generator = torch.Generator().manual_seed(5)
    shape, weights = (3, 4, 2), torch.tensor([0.3, 2.0])
    head_entropy = torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
    valid = torch.ones(shape[:2], dtype=torch.float64)
    valid[2, 1:] = 0.0
    zeros = torch.zeros(shape[:2], dtype=torch.float64)
    choice = torch.ones(shape, dtype=torch.bool)
    evaluation = Evaluation(zeros, head_entropy, choice, zeros)
    for weight in (None, valid):
        loss, metrics = ppo_loss(
            evaluation, zeros, zeros, zeros, weight, torch.tensor(0.2), 0.1 * weights.double(), 0.5
        )
        bonus = weighted_mean((0.1 * weights * head_entropy).sum(-1), weight)
        torch.testing.assert_close(loss, -bonus)
        (mine,), (reference,) = (
            torch.autograd.grad(x, [head_entropy], retain_graph=True) for x in (loss, -bonus)
        )
        torch.testing.assert_close(mine, reference)
        torch.testing.assert_close(
            metrics["entropy"], weighted_mean(head_entropy.sum(-1), weight).detach()
        )
    summaries, _ = learned(1, entropy_per_head=("op=2", "blueprint=0"))
    total = summaries[0]["entropy_weight"]
    assert summaries[0]["entropy_weight/op"] == pytest.approx(2 * total)
    assert summaries[0]["entropy_weight/blueprint"] == 0.0
    assert summaries[0]["entropy_weight/slot"] == pytest.approx(total)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (("hat=2",), "'hat' is unknown; there are op, "),
        (("op",), "give op=NUMBER"),
        (("op=-1",), "give op=NUMBER"),
        (("op=2", "op=3"), "op has two values"),
    ],
)
def test_weights_of_heads_that_cannot_be_are_refused(texts: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=f"^entropy_per_head: .*{says}"):
        learned(1, entropy_per_head=texts)


def test_a_warmup_fraction_is_converted_to_updates() -> None:
    config = LearnerConfig(lr_warmup_frac=0.1, lr_decay_steps=50)
    assert warmup_updates(config) == 5
    assert warmup_updates(LearnerConfig(lr_warmup_steps=7)) == 7


def learned(updates: int, **settings) -> tuple[list[dict], object]:
    agent = growth_agent(LearnerConfig(lstm_hidden=8, ppo_epochs=1, **settings), 0, CPU)
    summaries = [
        agent.update(synthetic_rollout(agent, 3, 8, 2, seed=i, episode=i)) for i in range(updates)
    ]
    return summaries, agent


def test_the_optimizer_uses_the_scheduled_learning_rate_of_each_group() -> None:
    """Adam's first step moves every weight that has a gradient by its learning rate."""
    settings = {"lr_warmup_steps": 4, "learning_rate": 1e-3, "value_learning_rate": 4e-3}
    agent = growth_agent(
        LearnerConfig(lstm_hidden=8, ppo_epochs=1, minibatches=1, **settings), 0, CPU
    )
    before = {name: p.detach().clone() for name, p in agent.policy.named_parameters()}
    summary = agent.update(synthetic_rollout(agent, 3, 8, 2, seed=1))
    assert summary["learning_rate/policy"] == pytest.approx(0.25e-3)
    assert summary["learning_rate/value"] == pytest.approx(1e-3)
    moved = {n: (p - before[n]).abs().max().item() for n, p in agent.policy.named_parameters()}
    assert moved["op_head.hidden.weight"] == pytest.approx(0.25e-3, rel=0.25)
    assert moved["value_head.hidden.weight"] == pytest.approx(1e-3, rel=0.25)


def test_reported_values_are_those_of_the_schedules() -> None:
    settings = {
        "lr_decay": "cosine", "lr_decay_steps": 4, "lr_warmup_steps": 1, "entropy_decay": "linear",
        "entropy_decay_steps": 4, "clip_decay": "step", "clip_decay_steps": 4, "clip_step_size": 2,
    }  # fmt: skip
    summaries, agent = learned(5, **settings)
    schedules = agent.schedules
    for update, summary in enumerate(summaries):
        for name, schedule in (
            ("learning_rate", schedules.policy_rate),
            ("entropy_weight", schedules.entropy),
            ("clip", schedules.clip),
        ):
            assert summary[name] == pytest.approx(schedule.at(update)), name


def test_the_environment_variable_disables_schedules(monkeypatch) -> None:
    monkeypatch.setenv("ESPER_DISABLE_LR_SCHEDULE", "1")
    summaries, _ = learned(2, lr_decay="linear", lr_decay_steps=2, lr_warmup_steps=1)
    assert [summary["learning_rate"] for summary in summaries] == pytest.approx([1e-3, 1e-3])


def test_the_adaptive_rate_follows_the_divergence() -> None:
    rate = AdaptiveRate(0.01, CPU)
    for kl, expected in ((0.03, 1 / 1.5), (0.01, 1 / 1.5), (0.001, 1.0), (0.001, 1.5)):
        rate.adapt(torch.tensor(kl))
        assert rate.factor.item() == pytest.approx(expected)
    rate.adapt(torch.tensor(math.nan))
    assert rate.factor.item() == pytest.approx(1.5)
    for _ in range(100):
        rate.adapt(torch.tensor(0.0))
    assert rate.factor.item() == pytest.approx(AdaptiveRate.MAX_FACTOR)


def test_an_update_far_from_its_target_changes_the_next_learning_rate() -> None:
    small, _ = learned(2, lr_adaptive_kl=10.0)
    assert small[1]["learning_rate"] == pytest.approx(1.5 * small[0]["learning_rate"])
    large, _ = learned(2, lr_adaptive_kl=1e-9)
    assert large[1]["learning_rate"] == pytest.approx(large[0]["learning_rate"] / 1.5)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"lr_adaptive_kl": 0.01, "lr_decay": "cosine"}, "lr_adaptive_kl"),
        ({"lr_warmup_frac": 0.1, "lr_warmup_steps": 3}, "lr_warmup_steps"),
        ({"lr_warmup_frac": 1.5}, "lr_warmup_frac"), ({"lr_warmup_steps": -1}, "lr_warmup_steps"),
        ({"lr_end_factor": 0.0}, "lr_end_factor"), ({"lr_decay": "exponential"}, "lr_decay"),
        ({"lr_decay_steps": 0}, "lr_decay_steps"), ({"clip_end_factor": 2.0}, "clip_end_factor"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(settings: dict, field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}: "):
        check(unflatten(settings, TrainConfig()))
