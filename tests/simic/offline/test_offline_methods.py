"""What offline learning minimises: weights of AWR in closed form, V-trace equal to IMPALA's."""

import copy
import math

import pytest
import torch
from torch import Tensor

from esper.leyline.config import LearnerConfig
from esper.leyline.config.offline import ImitationConfig, OfflineConfig
from esper.simic.algorithms.impala import ImpalaConfig
from esper.simic.growth.agent import growth_agent
from esper.simic.normalise import RunningMoments
from esper.simic.offline.methods import (
    AdvantageWeightedRegression,
    BehaviourCloning,
    OffPolicyActorCritic,
    loss_of,
)
from esper.simic.ppo import PPOAgent
from esper.simic.trainer import Batch, Trainer
from esper.tamiyo.policy.interface import Evaluation
from recorded_episodes import episodes_of, synthetic_episodes, whole_batch
from simic.test_trainer import gradients_of
from synthetic import CPU, synthetic_rollout

LENGTHS = [6, 3, 5, 6]


def moments_of(mean: float, deviation: float) -> RunningMoments:
    moments = RunningMoments((), CPU)
    moments.update(torch.tensor([mean - deviation, mean + deviation]))
    return moments


def evaluation_of(batch: Batch, seed: int = 0) -> tuple[Evaluation, Tensor, Tensor]:
    """An evaluation with random numbers, its log-probs and its values."""
    generator = torch.Generator().manual_seed(seed)
    log_prob, value = (torch.randn(batch.returns.shape, generator=generator) for _ in range(2))
    log_prob, value = (-log_prob.abs()).requires_grad_(), value.requires_grad_()
    heads = torch.rand(*batch.returns.shape, 8, generator=generator)
    return Evaluation(log_prob, heads, heads > 0.5, value), log_prob, value


def test_an_action_of_awr_counts_by_its_advantage() -> None:
    """``min(exp((G - V) / beta), cap)`` over its mean, step by step."""
    batch = whole_batch(synthetic_episodes(LENGTHS))
    returns, beta, cap = moments_of(0.5, 2.0), 0.4, 3.0
    evaluation, log_prob, value = evaluation_of(batch)
    loss, metrics = AdvantageWeightedRegression(0.7, returns, beta, cap)(evaluation, batch)
    loss.backward()
    deviation = math.sqrt(4.0 + 1e-4)
    weights, targets = {}, {}
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            targets[t, b] = (float(batch.returns[t, b]) - 0.5) / deviation
            weights[t, b] = min(math.exp((targets[t, b] - value[t, b].item()) / beta), cap)
    assert max(weights.values()) == cap
    assert min(weights.values()) < 1.0
    total = sum(weights.values())
    policy_loss = -sum(w * log_prob[at].item() for at, w in weights.items()) / total
    errors = [(value[at].item() - target) ** 2 for at, target in targets.items()]
    value_loss = 0.5 * sum(errors) / len(errors)
    assert float(metrics["policy_loss"]) == pytest.approx(policy_loss, rel=1e-5)
    assert float(metrics["value_loss"]) == pytest.approx(value_loss, rel=1e-5)
    assert loss.item() == pytest.approx(policy_loss + 0.7 * value_loss, rel=1e-5)
    for at, weight in weights.items():
        assert log_prob.grad[at].item() == pytest.approx(-weight / total, rel=1e-4)
        # The critic learns from its error alone: no gradient passes through the weights.
        expected = 0.7 * (value[at].item() - targets[at]) / len(weights)
        assert value.grad[at].item() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert float(log_prob.grad[3:, 1].abs().max()) == 0.0


def test_awr_without_temperature_to_speak_of_is_cloning() -> None:
    batch = whole_batch(synthetic_episodes(LENGTHS))
    returns = moments_of(0.0, 1.0)
    evaluation, _, _ = evaluation_of(batch)
    cloned, _ = BehaviourCloning(0.5, returns)(evaluation, batch)
    weighted, _ = AdvantageWeightedRegression(0.5, returns, 1e6, 20.0)(evaluation, batch)
    assert weighted.item() == pytest.approx(cloned.item(), rel=1e-4)


def test_the_lowest_temperature_leaves_finite_weights() -> None:
    batch = whole_batch(synthetic_episodes(LENGTHS))
    evaluation, log_prob, _ = evaluation_of(batch)
    evaluation = Evaluation(log_prob, evaluation.head_entropy, evaluation.head_choice,
                            evaluation.value.detach() + 1e4)  # fmt: skip
    method = AdvantageWeightedRegression(0.0, moments_of(0.0, 1.0), 1e-6, 20.0)
    loss, _ = method(evaluation, batch)
    assert math.isfinite(loss.item())


def test_metrics_are_means_over_steps_without_padding() -> None:
    batch = whole_batch(synthetic_episodes(LENGTHS))
    evaluation, log_prob, _ = evaluation_of(batch)
    _, metrics = BehaviourCloning(0.5, moments_of(0.0, 1.0))(evaluation, batch)
    inside = [(t, b) for b, length in enumerate(LENGTHS) for t in range(length)]
    nll = sum(-log_prob[at].item() for at in inside) / len(inside)
    assert float(metrics["negative_log_likelihood"]) == pytest.approx(nll, rel=1e-5)
    assert float(metrics["policy_loss"]) == pytest.approx(nll, rel=1e-5)
    entropy = sum(evaluation.head_entropy[at].sum().item() for at in inside) / len(inside)
    assert float(metrics["entropy"]) == pytest.approx(entropy, rel=1e-5)
    for head in range(8):
        chosen = [at for at in inside if bool(evaluation.head_choice[(*at, head)])]
        share = len(chosen) / len(inside)
        assert float(metrics["head_choice"][head]) == pytest.approx(share, rel=1e-5)


def impala_of(**settings) -> PPOAgent:
    config = {"lstm_hidden": 16, "ppo_epochs": 1, "minibatches": 1, "max_gradient_norm": 1e9}
    learner = LearnerConfig(**{**config, **settings})
    arguments = ImpalaConfig().learner_arguments(learner)
    return growth_agent(learner, 0, CPU, learner_arguments=arguments)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("trace_decay", [1.0, 0.9])
def test_the_step_of_vtrace_is_that_of_impala(lag: int, trace_decay: float) -> None:
    """On the rollout of the policy itself, and of an older one: losses and all gradients."""
    agent = impala_of(trace_decay=trace_decay, discount=0.97, learning_rate=1e-2)
    rollouts = [synthetic_rollout(agent, 6, 12, 3, seed=1)]
    for episode in range(2, 2 + lag):
        agent.update(rollouts[0])
        rollouts.append(synthetic_rollout(agent, 6, 12, 3, seed=episode, episode=episode))
    rollout = rollouts[0]
    policy, moments, returns = copy.deepcopy((agent.policy, agent.moments, agent.return_moments))
    config = agent.config
    method = OffPolicyActorCritic(
        config.value_weight, returns, config.discount, trace_decay, 1.0, 1.0, config.entropy
    )
    trainer = Trainer(policy, moments, returns, method, config, CPU, "off")
    found, metrics = gradients_of(trainer, whole_batch(episodes_of(rollout), config.discount))
    summary = agent.update(rollout)
    assert (summary["lag_kl"] > 1e-4) == (lag > 0)
    for name in ("loss", "policy_loss", "value_loss", "entropy", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(summary[name], rel=1e-5, abs=1e-6), name
    clipped = float(metrics["rho_clip_fraction"])
    assert clipped == pytest.approx(summary["rho_clip_fraction"])
    assert (clipped > 0.0) == (lag > 0)
    for name, parameter in agent.policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_vtrace_applies_rho_clip() -> None:
    """Ratios far above the bound: targets of rho 0.5, computed apart, for episodes of one step."""
    batch = whole_batch(synthetic_episodes([1, 1]))
    returns = moments_of(0.0, 1.0)
    evaluation, log_prob, value = evaluation_of(batch)
    batch = batch._replace(log_prob=log_prob.detach() - 5.0)
    method = OffPolicyActorCritic(1.0, returns, 1.0, 1.0, 0.5, 0.5, 0.0)
    _, metrics = method(evaluation, batch)
    deviation = math.sqrt(1.0 + 1e-4)
    errors = []
    for b in range(2):
        v = value[0, b].item() * deviation
        target = v + 0.5 * (float(batch.rewards[0, b]) - v)
        errors.append((value[0, b].item() - target / deviation) ** 2)
    assert float(metrics["value_loss"]) == pytest.approx(0.5 * sum(errors) / 2, rel=1e-4)
    assert float(metrics["rho_clip_fraction"]) == 1.0


def test_settings_choose_the_loss() -> None:
    returns = moments_of(0.0, 1.0)
    assert loss_of(ImitationConfig(value_weight=0.3), returns) == BehaviourCloning(0.3, returns)
    assert loss_of(OfflineConfig(method="bc"), returns) == BehaviourCloning(0.5, returns)
    awr = loss_of(OfflineConfig(temperature=0.2, weight_cap=7.0), returns)
    assert awr == AdvantageWeightedRegression(0.5, returns, 0.2, 7.0)
    given = {"rho_clip": 2.0, "c_clip": 1.5, "trace_decay": 0.8, "discount": 0.9, "entropy": 0.2}
    expected = OffPolicyActorCritic(0.5, returns, 0.9, 0.8, 2.0, 1.5, 0.2)
    assert loss_of(OfflineConfig(method="vtrace", **given), returns) == expected
