"""IMPALA updates: equal to PPO without a lag, corrected with one, and the lag itself."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import HEADS
from esper.leyline.config import LearnerConfig
from esper.simic.algorithms.impala import ImpalaConfig
from esper.simic.graphs import CapturedAgent
from esper.simic.growth.agent import GrowthMoments, growth_agent
from esper.simic.gym.collect import collect
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from scripted_gym import agent_for, scripted
from simic.graphs.test_capture import Replayer
from synthetic import CPU, synthetic_rollout

ONE_STEP = {"ppo_epochs": 1, "minibatches": 1, "max_gradient_norm": 1e9}
GYM = {"rollout_steps": 25, **ONE_STEP}


def growth(impala: ImpalaConfig | None, **settings: Any) -> PPOAgent:
    config = LearnerConfig(**{"lstm_hidden": 16, **ONE_STEP, **settings})
    return growth_agent(config, 0, CPU, learner_arguments=arguments_of(impala, config))


def arguments_of(impala: ImpalaConfig | None, config: LearnerConfig) -> dict[str, Any]:
    return {} if impala is None else impala.learner_arguments(config)


def rollout_of(agent: PPOAgent, episode: int) -> Rollout:
    """An episode that ``agent.actor`` acts."""
    return synthetic_rollout(agent.actor, 6, 12, 3, seed=episode, episode=episode)


def close(mine: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def assert_same_step(ppo: PPOAgent, impala: PPOAgent, rollouts: list[Rollout]) -> None:
    """Advantages, targets, losses and gradients of an update agree to 1e-6."""
    batches = [a._prepare_batch(r) for a, r in zip((ppo, impala), rollouts, strict=True)]
    for name in ("old_log_prob", "advantages", "targets"):
        mine, other = (getattr(batch.sequences, name) for batch in batches)
        weight = batches[0].sequences.weight
        inside = slice(None) if weight is None else weight > 0
        close(other[inside], mine[inside])
    summaries = [a.update(r) for a, r in zip((ppo, impala), rollouts, strict=True)]
    for name in ("loss", "policy_loss", "value_loss", "entropy", "return_mean", "value_mean"):
        assert summaries[1][name] == pytest.approx(summaries[0][name], rel=1e-6, abs=1e-6), name
    assert summaries[1]["lag_kl"] == pytest.approx(0.0, abs=1e-10)
    assert summaries[1]["rho_clip_fraction"] == 0.0
    for mine, other in zip(ppo.policy.parameters(), impala.policy.parameters(), strict=True):
        close(other.grad, mine.grad)


@pytest.mark.parametrize("trace_decay", [1.0, 0.9])
def test_without_a_lag_a_step_is_that_of_ppo(trace_decay: float) -> None:
    """With a trace decay of 1 these are Monte Carlo returns; all eight heads have gradients."""
    ppo, impala = (
        growth(kind, trace_decay=trace_decay, discount=0.97) for kind in (None, ImpalaConfig())
    )
    for episode in range(3):
        rollout = rollout_of(ppo, episode)
        assert_same_step(ppo, impala, [rollout, rollout])
        # Adam amplifies differences in the last bits, so every round starts from the same weights.
        impala.load_state(copy.deepcopy(ppo.state()))
    for head in (*HEADS, "value"):
        assert any(float(p.grad.abs().max()) > 0.0 for p in impala.policy.head_parameters(head))


@pytest.mark.parametrize("settings", [{}, {"critic": "separate"}, {"memory": "none"}])
def test_without_a_lag_a_step_on_padded_sequences_is_that_of_ppo(settings: dict) -> None:
    """Episodes end in every way within the rollout: masks, padding, truncation, stored state."""
    agents, places = [], []
    for algorithm in ("ppo", "impala"):
        places.append(scripted(5))
        agents.append(agent_for(places[-1], algorithm=algorithm, **GYM, **settings))
    for number in range(3):
        rollouts = [
            collect(place, agent.actor, 25, number)
            for place, agent in zip(places, agents, strict=True)
        ]
        assert bool(rollouts[0].truncated.any())
        assert not bool(rollouts[0].valid.all())
        assert_same_step(*agents, rollouts)
        agents[1].load_state(copy.deepcopy(agents[0].state()))


# --- the lag ----------------------------------------------------------------------------------


def everything(agent: PPOAgent, policy: Any, moments: Any) -> list[Tensor]:
    parts = [*policy.state_dict().values()]
    parts += [x for part in moments.parts().values() for x in part.state().values()]
    return [x.detach().clone() for x in parts]


@pytest.mark.parametrize("lag", [1, 3])
def test_the_actor_has_the_weights_and_moments_of_lag_updates_ago(lag: int) -> None:
    agent = growth(ImpalaConfig(lag=lag))
    history = []
    for episode in range(7):
        history.append(everything(agent, agent.policy, agent.moments))
        expected = history[max(0, episode - lag)]
        found = everything(agent, agent.actor.policy, agent.actor.moments)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        agent.update(rollout_of(agent, episode))
    assert not any(torch.equal(a, b) for a, b in zip(history[0][:5], history[1][:5], strict=True))


def test_without_a_lag_the_learner_itself_acts() -> None:
    for impala in (None, ImpalaConfig()):
        agent = growth(impala)
        assert agent.actor is agent
        assert "lagged_actor" not in agent.state()


def test_recorded_log_probs_are_those_of_the_weights_that_acted() -> None:
    agent = growth(ImpalaConfig(lag=2), learning_rate=1e-2)
    for episode in range(4):
        agent.update(rollout_of(agent, episode))
    rollout = rollout_of(agent, 4)
    hidden = agent.policy.initial_hidden(12)

    def log_prob(actor: Any) -> Tensor:
        observation = actor.moments.normalise(rollout.observation)
        return actor.policy.evaluate_actions(observation, rollout.actions, hidden).log_prob

    torch.testing.assert_close(log_prob(agent.actor), rollout.log_prob, rtol=1e-5, atol=1e-5)
    assert float((log_prob(agent) - rollout.log_prob).detach().abs().max()) > 0.05
    summary = agent.update(rollout)
    # Ratios of the loss are relative to the policy before the update, not to the one that acted.
    assert summary["first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert summary["lag_kl"] > 1e-4


def stepwise(agent: PPOAgent, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, values and last value under the current policy, one step at a time."""
    hidden, log_probs, values = rollout.hidden, [], []
    observation = agent.moments.normalise(rollout.observation)
    last = agent.moments.normalise(rollout.last_observation)
    with torch.no_grad():
        for t in range(len(rollout.actions)):
            seen = picked_flat(observation, t)
            found = agent.policy.evaluate_actions(seen, rollout.actions[t][None], hidden)
            hidden = agent.policy.run_lstm(agent.policy.encode(seen)[0], hidden)[1]
            over = ~rollout.valid[t][:, None]
            hidden = tuple(torch.where(over, 0.0, state) for state in hidden)
            log_probs.append(found.log_prob[0])
            values.append(found.value[0])
        seen = type(last).from_tensors({name: x[None] for name, x in last.tensors().items()})
        found = agent.policy.evaluate_actions(seen, rollout.actions[-1][None], hidden)
    return torch.stack(log_probs), torch.stack(values), found.value[0]


def picked_flat(observation: Any, t: int) -> Any:
    return type(observation).from_tensors(
        {name: x[t][None] for name, x in observation.tensors().items()}
    )


@pytest.mark.parametrize("settings", [{}, {"critic": "separate"}, {"memory": "none"}])
def test_a_rollout_is_evaluated_as_the_current_policy_would_step_by_step(settings: dict) -> None:
    place = scripted(5)
    agent = agent_for(place, algorithm="impala", lag=1, learning_rate=1e-2, **GYM, **settings)
    agent.actor.begin(torch.arange(5), 0)
    for number in range(4):
        rollout = collect(place, agent.actor, 25, number)
        expected = stepwise(agent, rollout)
        estimates = agent.estimator.estimate(
            rollout, agent.policy, agent.moments, agent.return_moments
        )
        valid = rollout.valid
        close(estimates.old_log_prob[valid], expected[0][valid])
        values = agent.return_moments.restore(expected[1])
        torch.testing.assert_close(estimates.values, values, rtol=1e-5, atol=1e-5)
        # The value after the last step is in the return of a last step that does not terminate.
        open_ended = valid[-1] & ~rollout.terminated[-1]
        assert bool(open_ended.any())
        returns = rollout.rewards[-1] + 0.99 * agent.return_moments.restore(expected[2])
        torch.testing.assert_close(
            estimates.returns[-1][open_ended], returns[open_ended], rtol=1e-5, atol=1e-5
        )
        agent.update(rollout)
    assert float((rollout.log_prob - expected[0])[valid].abs().max()) > 0.01


def test_contents_of_resetting_steps_do_not_affect_the_update() -> None:
    states, summaries = [], []
    for poisoned in (False, True):
        place = scripted(5)
        agent = agent_for(place, algorithm="impala", lag=1, **GYM)
        agent.actor.begin(torch.arange(5), 0)
        rollout = collect(place, agent.actor, 25, 0)
        if poisoned:
            rollout.log_prob[~rollout.valid] = -1e6
            rollout.rewards[~rollout.valid] = 1e6
        summaries.append(agent.update(rollout))
        states.append(agent.state()["policy"])
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())
    assert summaries[0] == summaries[1]


# --- the correction ---------------------------------------------------------------------------


def lagging(correction: str, **settings: Any) -> tuple[PPOAgent, Rollout]:
    """An agent whose actor is far behind, and a rollout of that actor."""
    impala = ImpalaConfig(lag=3, correction=correction)  # type: ignore[arg-type]
    agent = growth(impala, learning_rate=3e-2, **settings)
    for episode in range(4):
        agent.update(rollout_of(agent, episode))
    return agent, rollout_of(agent, 4)


def test_the_gradient_is_that_of_the_paper() -> None:
    """``rho_s A_s d log pi(a_s|x_s)`` by autograd, with A normalised under the current policy."""
    agent, rollout = lagging("vtrace", entropy=0.0, value_weight=0.0, trace_decay=1.0)
    observation = agent.moments.normalise(rollout.observation)
    evaluation = agent.policy.evaluate_actions(
        observation, rollout.actions, agent.policy.initial_hidden(12)
    )
    ratio = (evaluation.log_prob - rollout.log_prob).exp().detach()
    rho = ratio.clamp(max=1.0)
    assert float(rho.min()) < 0.5
    values = agent.return_moments.restore(evaluation.value.detach())
    v = torch.zeros(7, 12)
    advantages = torch.zeros(6, 12)
    for s in reversed(range(6)):
        following = v[s + 1] if s < 5 else torch.zeros(12)
        next_value = values[s + 1] if s < 5 else torch.zeros(12)
        advantages[s] = rollout.rewards[s] + following - values[s]
        delta = rho[s] * (rollout.rewards[s] + next_value - values[s])
        v[s] = values[s] + delta + rho[s] * (following - next_value)
    mean = (rho * advantages).sum() / rho.sum()
    deviation = ((rho * (advantages - mean).square()).sum() / rho.sum()).sqrt()
    normalised = (advantages - mean) / deviation
    agent.policy.zero_grad()
    (-(rho * normalised * evaluation.log_prob).mean()).backward()
    expected = [p.grad.clone() for p in agent.policy.parameters() if p.grad is not None]
    agent.update(rollout)
    found = [p.grad for p in agent.policy.parameters() if p.grad is not None]
    for mine, other in zip(found[: len(expected)], expected, strict=False):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_a_step_that_the_current_policy_would_not_take_does_not_move_it() -> None:
    """Its ratio is 0, and so is its advantage, even after normalisation."""
    agent, rollout = lagging("vtrace")
    rollout.log_prob[2, 4] += 60.0
    found = agent._prepare_batch(rollout)
    assert abs(float(found.sequences.advantages[2, 4])) < 1e-12
    weight = found.estimates.rho
    assert float(found.sequences.advantages.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(weight[2, 4]) < 1e-12


def test_without_correction_the_lag_is_ignored() -> None:
    """The estimates are then those of an actor that has the current log-probs."""
    agent, rollout = lagging("none")
    corrected = growth(ImpalaConfig(lag=3))
    corrected.load_state(copy.deepcopy(agent.state()))
    off, on = (a._prepare_batch(rollout).estimates for a in (agent, corrected))
    assert float((off.targets - on.targets).abs().max()) > 0.05
    assert bool((off.rho == 1.0).all())
    rollout.log_prob.copy_(off.old_log_prob)
    on = corrected._prepare_batch(rollout).estimates
    close(on.targets, off.targets)
    close(on.advantages, off.advantages)


def test_a_wider_clip_changes_the_targets() -> None:
    agent, rollout = lagging("vtrace")
    wide = growth(ImpalaConfig(lag=3, rho_clip=5.0, c_clip=2.0))
    wide.load_state(copy.deepcopy(agent.state()))
    one, other = (a._prepare_batch(rollout).estimates for a in (agent, wide))
    assert float(other.rho.max()) > 1.0 >= float(one.rho.max())
    assert not torch.equal(one.targets, other.targets)


# --- state and graphs -------------------------------------------------------------------------


def test_a_restored_agent_continues_with_the_same_bits() -> None:
    straight = growth(ImpalaConfig(lag=2))
    for episode in range(3):
        straight.update(rollout_of(straight, episode))
    restored = growth(ImpalaConfig(lag=2))
    restored.load_state(copy.deepcopy(straight.state()))
    for episode in range(3, 7):
        results = [agent.update(rollout_of(agent, episode)) for agent in (straight, restored)]
        assert results[0] == results[1]
    for mine, other in zip(straight.policy.parameters(), restored.policy.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_captured_agent_learns_the_same_bits_as_a_plain_one(lag: int) -> None:
    config = LearnerConfig(lstm_hidden=8, ppo_epochs=2, minibatches=2)
    impala = ImpalaConfig(lag=lag)
    recorder = Replayer()
    agents = [
        growth_agent(config, 0, CPU, learner_arguments=arguments_of(impala, config)),
        CapturedAgent(
            config, 0, CPU, lambda: FactoredLSTM(8), GrowthMoments(CPU), recorder=recorder,
            **arguments_of(impala, config),
        ),
    ]  # fmt: skip
    results = [
        [agent.update(synthetic_rollout(agent.actor, 5, 8, 2, seed=i, episode=i)) for i in range(5)]
        for agent in agents
    ]
    assert results[0] == results[1]
    assert recorder.recorded == 2
    if lag:
        assert max(update["lag_kl"] for update in results[0]) > 1e-6


def test_non_finite_rollout_is_refused_and_lagged_actor_advances() -> None:
    agent = growth(ImpalaConfig(lag=1))
    agent.update(rollout_of(agent, 0))
    before = {name: x.clone() for name, x in agent.policy.state_dict().items()}
    rollout = rollout_of(agent, 1)
    rollout.rewards[2, 3] = math.nan
    agent.update(rollout)
    assert agent.refusal is not None
    assert agent.refusal.tensor == "reward"
    assert all(torch.equal(x, before[name]) for name, x in agent.policy.state_dict().items())
    acting = agent.actor.policy.state_dict()
    assert all(torch.equal(x, before[name]) for name, x in acting.items())


def test_a_compiled_policy_learns_the_same(monkeypatch) -> None:
    """Graphs are traced without code generation, which takes a minute."""
    compile_function = torch.compile

    def trace(function, mode):
        return compile_function(function, backend="aot_eager", fullgraph=False)

    monkeypatch.setattr(torch, "compile", trace)
    torch._dynamo.reset()
    config = LearnerConfig(lstm_hidden=8, **ONE_STEP)
    plain, compiled = (
        growth_agent(
            config, 0, CPU, None, mode, learner_arguments=arguments_of(ImpalaConfig(lag=1), config)
        )
        for mode in ("off", "default")
    )
    for episode in range(3):
        rollout = rollout_of(plain, episode)
        metrics = [agent.update(rollout) for agent in (plain, compiled)]
        assert compiled.compiled.active
        assert metrics[1]["first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        for name in ("policy_loss", "value_loss", "entropy", "grad_norm", "lag_kl"):
            assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-5), name


def test_half_precision_evaluates_as_it_acts() -> None:
    config = LearnerConfig(lstm_hidden=16, **ONE_STEP)
    agent = growth_agent(
        config, 0, CPU, torch.bfloat16, learner_arguments=arguments_of(ImpalaConfig(), config)
    )
    summary = agent.update(rollout_of(agent, 0))
    assert summary["lag_kl"] == pytest.approx(0.0, abs=1e-3)
    assert summary["refused"] == 0.0
