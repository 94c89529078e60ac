"""PPO updates on synthetic rollouts: learning, determinism, bounds and refusals."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import HEADS, Op
from esper.leyline.config import LearnerConfig
from esper.simic import gradients
from esper.simic.growth.agent import growth_agent
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import HOST_FEATURES, SIZE_FEATURES
from synthetic import CPU, changed, picked, random_observation, synthetic_rollout

LENGTH, ENVIRONMENTS, SLOTS = 6, 12, 3


def agent_with(seed: int = 0, **settings) -> PPOAgent:
    return growth_agent(
        LearnerConfig(**({"lstm_hidden": 16, "minibatches": 2} | settings)), seed, CPU
    )


def rollout_of(agent: PPOAgent, seed: int = 1, episode: int = 0) -> Rollout:
    return synthetic_rollout(agent, LENGTH, ENVIRONMENTS, SLOTS, seed, episode)


def weights(agent: PPOAgent) -> dict[str, Tensor]:
    return copy.deepcopy(agent.policy.state_dict())


def everything(agent: PPOAgent) -> list[Tensor]:
    """Weights, optimizer state and moments."""
    optimizer = agent.optimizer.state()
    moments = (agent.moments.host, agent.moments.slots, agent.return_moments)
    parts = [*agent.policy.state_dict().values()]
    parts += [t for state in optimizer.values() for t in state.values()]
    parts += [t for moment in moments for t in moment.state().values()]
    return [part.detach().clone() for part in parts]


def same_bits(one: list[Tensor] | dict, other: list[Tensor] | dict) -> bool:
    if isinstance(one, dict):
        return all(torch.equal(one[name], other[name]) for name in one)
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- learning ---------------------------------------------------------------------------------


def test_the_first_minibatch_is_exactly_on_policy() -> None:
    """Also in later rounds, when moments and weights have moved."""
    agent = agent_with()
    for episode in range(4):
        summary = agent.update(rollout_of(agent, seed=episode, episode=episode))
        assert summary["first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert summary["first_kl"] == pytest.approx(0.0, abs=1e-5)
    assert summary["ratio_max"] > 1.0 + 1e-4


def test_every_head_learns_if_every_op_occurs() -> None:
    agent = agent_with()
    rollout = rollout_of(agent)
    assert set(rollout.actions[..., 0].flatten().tolist()) == {int(op) for op in Op}
    before = {h: [p.clone() for p in agent.policy.head_parameters(h)] for h in (*HEADS, "value")}
    summary = agent.update(rollout)
    for head in (*HEADS, "value"):
        norm = summary[f"head_grad_norms/{head}"]
        assert math.isfinite(norm)
        assert norm > 0.0
        moved = zip(before[head], agent.policy.head_parameters(head), strict=True)
        assert all(bool((old != new).any()) for old, new in moved), head
    assert all(math.isfinite(value) for value in summary.values())
    assert summary["refused"] == summary["stopped"] == 0.0


def test_heads_without_a_choice_do_not_change() -> None:
    agent = agent_with()
    rollout = rollout_of(agent)
    rollout.observation.masks.slots[:] = False
    rollout.observation.masks.slots[:, :, [Op.WAIT, Op.ADVANCE]] = True
    agent.begin(torch.arange(ENVIRONMENTS), 0)
    for t in range(LENGTH):
        observation = picked(rollout.observation, t)
        rollout.write(t, observation, *agent.act(observation, t))
    before = {head: [p.clone() for p in agent.policy.head_parameters(head)] for head in HEADS}
    summary = agent.update(rollout)
    for head in HEADS:
        moved = [
            bool((old != new).any())
            for old, new in zip(before[head], agent.policy.head_parameters(head), strict=True)
        ]
        assert any(moved) == (head in ("op", "slot")), head
        assert (summary[f"head_grad_norms/{head}"] > 0.0) == (head in ("op", "slot"))


def test_the_policy_moves_towards_rewarded_actions() -> None:
    """Bandit: 1 whenever the op was WAIT, against an initial bias for ADVANCE."""
    agent = agent_with(learning_rate=3e-3, entropy=0.0, target_kl=1.0)
    shares = []
    for episode in range(12):
        observation = random_observation((LENGTH, ENVIRONMENTS), SLOTS, seed=episode)
        masks = torch.zeros_like(observation.masks.slots)
        masks[:, :, [Op.WAIT, Op.ADVANCE]] = True
        observation = changed(observation, mask_slots=masks)
        agent.begin(torch.arange(ENVIRONMENTS), episode)
        rollout = None
        for t in range(LENGTH):
            seen = picked(observation, t)
            actions, *said = agent.act(seen, t)
            rollout = rollout or Rollout(LENGTH, seen, actions)
            rollout.write(t, seen, actions, *said)
            rollout.outcome(t, (actions[:, 0] == Op.WAIT).float(), t == LENGTH - 1)
        shares.append((rollout.actions[..., 0] == Op.WAIT).float().mean().item())
        agent.update(rollout)
    assert sum(shares[:3]) / 3 < 0.5
    assert sum(shares[-3:]) / 3 > 0.7


def test_the_critic_learns_the_closed_form_of_a_constant_reward() -> None:
    """Reward 1 per step for 10 steps, discount 1, terminated: V(t) = 10 - t."""
    length, closed_form = 10, 10.0 - torch.arange(10.0)
    agent = agent_with(seed=1)
    found = []
    for episode in range(65):
        rollout = synthetic_rollout(
            agent, length, 16, 2, seed=episode, episode=episode, reward=lambda t: torch.ones(16)
        )
        found.append(agent.return_moments.restore(rollout.values).mean(1))
        summary = agent.update(rollout)
    recent = torch.stack(found[-10:]).mean(0)
    torch.testing.assert_close(recent, closed_form, rtol=0.0, atol=0.3)
    assert summary["explained_variance"] > 0.95
    assert summary["return_mean"] == pytest.approx(10.0, abs=0.6)


def test_discount_and_rewards_reach_the_critic() -> None:
    """Discount 0: a state's value is its reward, here 3 in the first half and -1 in the second."""
    agent = agent_with(seed=2, discount=0.0, learning_rate=3e-3)
    for episode in range(50):
        rollout = synthetic_rollout(
            agent, LENGTH, 16, 2, seed=episode, episode=episode,
            reward=lambda t: torch.full((16,), 3.0 if t < LENGTH / 2 else -1.0),
        )  # fmt: skip
        agent.update(rollout)
    values = agent.return_moments.restore(rollout.values).mean(1)
    expected = torch.tensor([3.0, 3.0, 3.0, -1.0, -1.0, -1.0])
    torch.testing.assert_close(values, expected, rtol=0.0, atol=0.5)


# --- determinism ------------------------------------------------------------------------------


def test_the_same_seed_learns_the_same_bits() -> None:
    first, second, other = agent_with(seed=3), agent_with(seed=3), agent_with(seed=4)
    torch.manual_seed(123)  # nothing may draw from the global generator
    for agent in (first, second, other):
        for episode in range(3):
            summary = agent.update(rollout_of(agent, seed=episode, episode=episode))
        torch.rand(7)
    assert same_bits(everything(first), everything(second))
    assert not same_bits(weights(first), weights(other))
    assert summary["learning_rate"] == pytest.approx(LearnerConfig().learning_rate)


def test_building_an_agent_does_not_change_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    agent = agent_with()
    agent.update(rollout_of(agent))
    assert torch.equal(torch.rand(3), expected)


def test_a_round_is_normalised_with_moments_of_earlier_rounds() -> None:
    agent = agent_with()
    rollout = rollout_of(agent)
    seen = agent.moments.normalise(rollout.observation)
    assert torch.equal(seen.host, rollout.observation.host)  # nothing seen yet
    agent.update(rollout)
    flat = rollout.observation.host.double().flatten(0, 1)
    expected = (flat - flat.mean(0)) / (flat.var(0, correction=0) + 1e-4).sqrt()
    seen = agent.moments.normalise(rollout.observation)
    expected = expected.clamp(-10, 10)
    sizes = [HOST_FEATURES.index(name) for name in SIZE_FEATURES if name in HOST_FEATURES]
    expected[:, sizes] = flat[:, sizes]
    torch.testing.assert_close(seen.host.flatten(0, 1), expected.float())
    kept = ("blueprints", "critic", "mask_slots", "mask_kinds")
    for name in kept:
        assert torch.equal(seen.tensors()[name], rollout.observation.tensors()[name])


def test_every_epoch_and_every_update_has_minibatches_of_its_own() -> None:
    agent = agent_with(ppo_epochs=3, minibatches=5)
    episodes = SimpleNamespace(count=ENVIRONMENTS, counts=None, lengths=None)
    orders = []
    for _ in range(3):
        drawn = agent._draw_minibatches(episodes)
        epochs = torch.cat(drawn).view(3, ENVIRONMENTS)
        assert [sorted(order) for order in epochs.tolist()] == [[*range(ENVIRONMENTS)]] * 3
        orders += [tuple(order) for order in epochs.tolist()]
        agent.updates += 1
    assert len(set(orders)) == 9


def test_minibatches_hold_whole_episodes_and_every_environment_once_an_epoch() -> None:
    """Environments are identified by a marked critic feature; one minibatch per epoch or more."""
    marks: list[list[int]] = []
    agent = agent_with(ppo_epochs=3, minibatches=5)
    evaluate = agent.policy.evaluate_actions

    def spy(observation, actions, hidden):
        assert actions.shape[0] == LENGTH
        assert bool((observation.critic[:, :, 0] == observation.critic[:1, :, 0]).all())
        marks.append(observation.critic[0, :, 0].long().tolist())
        return evaluate(observation, actions, hidden)

    rollout = rollout_of(agent)
    rollout.observation.critic[..., 0] = torch.arange(ENVIRONMENTS)
    agent.policy.evaluate_actions = spy
    agent.update(rollout)
    assert len(marks) == 15
    epochs = [[mark for part in marks[i : i + 5] for mark in part] for i in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(ENVIRONMENTS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


# --- bounds -----------------------------------------------------------------------------------


def test_after_the_kl_bound_is_exceeded_no_step_of_the_update_is_taken() -> None:
    """The first step of an update has KL 0 and is therefore always taken."""
    settings = {"minibatches": 1, "learning_rate": 1e-2}
    stopping = agent_with(ppo_epochs=4, target_kl=1e-9, **settings)
    single = agent_with(ppo_epochs=1, target_kl=1e-9, **settings)
    free = agent_with(ppo_epochs=4, target_kl=1e9, **settings)
    rollout = rollout_of(stopping)
    summaries = [agent.update(rollout) for agent in (stopping, single, free)]
    assert [summary["stopped"] for summary in summaries] == [1.0, 0.0, 0.0]
    assert same_bits(everything(stopping), everything(single))
    assert not same_bits(weights(stopping), weights(free))
    # The next update takes steps again.
    before = weights(stopping)
    stopping.update(rollout_of(stopping, seed=2, episode=1))
    assert not same_bits(weights(stopping), before)


def test_a_stop_holds_for_all_later_minibatches() -> None:
    """One environment is far off policy: no step is taken only if the first minibatch has it."""
    unmoved = 0
    for n in range(ENVIRONMENTS):
        agent = agent_with(ppo_epochs=1, minibatches=4, target_kl=0.01)
        rollout = rollout_of(agent)
        rollout.log_prob[:, n] += 1.0
        before = weights(agent)
        assert agent.update(rollout)["stopped"] == 1.0
        unmoved += same_bits(weights(agent), before)
    assert unmoved == ENVIRONMENTS // 4


def bandit(agent: PPOAgent, scale: float = 1.0) -> tuple[Rollout, Tensor]:
    """A rollout in which advantages are rewards, plus and minus ``scale``; and their signs."""
    rollout = rollout_of(agent)
    places = torch.arange(LENGTH)[:, None] + torch.arange(ENVIRONMENTS)
    signs = 1.0 - 2.0 * (places % 2)
    rollout.rewards.copy_(scale * signs)
    rollout.values.zero_()
    return rollout, signs


BANDIT = {
    "ppo_epochs": 1, "minibatches": 1, "discount": 0.0, "trace_decay": 0.0, "entropy": 0.0,
    "value_weight": 0.0, "target_kl": 1e9,
}  # fmt: skip


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_a_ratio_outside_its_bounds_is_only_pushed_back(direction) -> None:
    """Ratios of e for rewarded and 1/e for penalised actions, or the reverse, which is undone."""
    agent = agent_with(**BANDIT)
    rollout, signs = bandit(agent)
    rollout.log_prob -= direction * signs
    before = weights(agent)
    summary = agent.update(rollout)
    assert summary["clip_fraction"] == 1.0
    assert same_bits(weights(agent), before) == (direction > 0.0)


def test_advantages_are_normalised_with_a_floor_on_the_deviation() -> None:
    """Deviations below 0.1 are divided by 0.1."""

    def learned(scale: float, shift: float = 0.0) -> dict[str, float]:
        agent = agent_with(**BANDIT)
        rollout, _ = bandit(agent, scale)
        rollout.rewards += shift
        return agent.update(rollout)

    one = learned(1.0)["grad_norm"]
    assert learned(10.0)["grad_norm"] == pytest.approx(one, rel=1e-4)
    assert learned(1.0, shift=30.0)["grad_norm"] == pytest.approx(one, rel=1e-3)
    assert learned(0.01)["grad_norm"] == pytest.approx(0.1 * one, rel=0.02)
    assert learned(1.0, shift=30.0)["policy_loss"] == pytest.approx(0.0, abs=1e-5)


def test_the_entropy_bonus_raises_entropy() -> None:
    agent = agent_with(**(BANDIT | {"entropy": 1.0, "ppo_epochs": 8}))
    rollout, _ = bandit(agent, scale=0.0)
    first, second = agent.update(rollout), agent.update(rollout)
    assert second["entropy"] > first["entropy"]


def test_a_greedy_agent_acts_the_same_in_every_episode() -> None:
    def greedy_actions(episode: int, greedy: bool) -> Tensor:
        agent = agent_with(seed=6)
        agent.greedy = greedy
        return synthetic_rollout(agent, LENGTH, ENVIRONMENTS, SLOTS, 1, episode).actions

    assert torch.equal(greedy_actions(0, True), greedy_actions(1, True))
    assert not torch.equal(greedy_actions(0, False), greedy_actions(1, False))


def test_the_gradient_of_a_step_is_clipped() -> None:
    """Adam's first moment after one step is 0.1 of the clipped gradient."""
    agent = agent_with(ppo_epochs=1, minibatches=1, max_gradient_norm=0.01)
    summary = agent.update(rollout_of(agent))
    assert summary["grad_norm"] > 0.01
    moments = [state["exp_avg"] for state in agent.optimizer.state().values()]
    norm = torch.cat([m.flatten() for m in moments]).norm().item()
    assert norm == pytest.approx(0.1 * 0.01, rel=1e-3)


# --- refusal ----------------------------------------------------------------------------------

NONSENSE = [math.nan, math.inf, -math.inf]


def about_to_learn_from(where: str, nonsense: float) -> tuple[PPOAgent, Rollout]:
    """An agent in its second round, and a rollout with one corrupted number."""
    agent = agent_with(ppo_epochs=2, minibatches=1)
    agent.update(rollout_of(agent, seed=8))
    rollout = rollout_of(agent, seed=9, episode=1)
    spoilt = getattr(rollout if hasattr(rollout, where) else rollout.observation, where)
    spoilt.view(-1)[spoilt.numel() // 2] = nonsense
    return agent, rollout


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("where", ["rewards", "values", "host", "slots", "critic"])
def test_one_number_that_is_not_finite_prevents_every_weight_change(where, nonsense) -> None:
    agent, rollout = about_to_learn_from(where, nonsense)
    before = weights(agent)
    optimizer = copy.deepcopy(agent.optimizer.state())
    summary = agent.update(rollout)
    assert summary["refused"] > 0.0
    assert same_bits(weights(agent), before)
    after = agent.optimizer.state()
    assert all(same_bits(optimizer[i], after[i]) for i in optimizer)


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("where", ["rewards", "host", "slots", "critic"])
def test_the_round_after_a_refusal_learns_again(where, nonsense) -> None:
    """The normalisers must not include the refused data."""
    agent, rollout = about_to_learn_from(where, nonsense)
    agent.update(rollout)
    before = weights(agent)
    summary = agent.update(rollout_of(agent, seed=10, episode=2))
    assert summary["refused"] == 0.0
    assert not same_bits(weights(agent), before)
    assert all(bool(part.isfinite().all()) for part in everything(agent))


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_log_prob_that_is_not_finite_prevents_every_weight_change(nonsense) -> None:
    """An infinite KL may stop the round instead."""
    agent, rollout = about_to_learn_from("log_prob", nonsense)
    before = weights(agent)
    summary = agent.update(rollout)
    assert summary["refused"] + summary["stopped"] > 0.0
    assert same_bits(weights(agent), before)


def bad_gradient(agent: PPOAgent, calls: int) -> None:
    """From backward pass number ``calls`` on, one weight's gradient is NaN."""
    seen = []

    def spoil(gradient: Tensor) -> Tensor:
        seen.append(1)
        return gradient * math.nan if len(seen) >= calls else gradient

    agent.policy.op_head.out.weight.register_hook(spoil)


def test_a_refused_step_skips_the_rest_of_its_update() -> None:
    """The minibatches before it were learned from; those after it are not."""
    agent, reference = (
        agent_with(ppo_epochs=1, minibatches=4),
        agent_with(ppo_epochs=1, minibatches=4),
    )
    rollout = rollout_of(agent)
    bad_gradient(agent, calls=3)
    assert agent.update(rollout)["refused"] == 1.0
    learn, count = reference._minibatch_step, []

    def only_two(part, stopped):
        count.append(1)
        return learn(part, torch.ones(()) if len(count) > 2 else stopped)

    reference._minibatch_step = only_two
    reference.update(rollout)
    assert same_bits(weights(agent), weights(reference))


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("rewards", "reward"),
        ("values", "value"),
        ("log_prob", "log_prob"),
        ("host", "observation/host"),
        ("critic", "observation/critic"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(where, name) -> None:
    agent, rollout = about_to_learn_from(where, math.nan)
    agent.update(rollout)
    assert agent.refusal.tensor == name
    agent.update(rollout_of(agent, seed=10, episode=2))
    assert agent.refusal is None


def test_a_gradient_and_a_moment_of_the_optimizer_are_named() -> None:
    agent = agent_with()
    agent.update(rollout_of(agent))
    bad_gradient(agent, calls=1)
    agent.update(rollout_of(agent))
    assert agent.refusal.tensor == "gradient/op_head.out.weight"
    agent = agent_with()
    agent.update(rollout_of(agent))
    agent.optimizer.states[agent.policy.op_head.out.bias]["exp_avg_sq"][0] = math.inf
    before = weights(agent)
    assert agent.update(rollout_of(agent))["refused"] == 1.0
    assert agent.refusal.tensor == "optimizer/op_head.out.bias/exp_avg_sq"
    assert same_bits(weights(agent), before)


def test_a_weight_that_is_not_finite_is_named_before_its_consequences() -> None:
    agent = agent_with()
    with torch.no_grad():
        agent.policy.value_head.out.bias[0] = math.nan
    rollout = rollout_of(agent_with())
    agent.update(rollout)
    assert agent.refusal.tensor == "policy/value_head.out.bias"


def test_an_advantage_that_overflows_is_named() -> None:
    """The rewards are finite, but their sum is not."""
    agent = agent_with()
    rollout = rollout_of(agent)
    rollout.rewards[:] = 3e38
    before = weights(agent)
    assert agent.update(rollout)["refused"] == 1.0
    assert agent.refusal.tensor == "advantage"
    assert same_bits(weights(agent), before)


# --- rates, and what stops a step -------------------------------------------------------------


def test_each_group_has_its_own_rate() -> None:
    agent = agent_with(learning_rate=1e-3, value_learning_rate=4e-3, lr_warmup_steps=0)
    agent.update(rollout_of(agent))
    expected = {"policy": 1e-3, "value": 4e-3}
    assert {n: r.item() for n, r in agent.optimizer.rates.items()} == pytest.approx(expected)


def test_schedules_follow_the_number_of_updates_done() -> None:
    """A linear decay to 0 over ten updates."""
    linear = {"decay": "linear", "decay_steps": 10, "end_factor": 0.0}
    settings = {f"{of}_{k}": v for of in ("lr", "clip", "entropy") for k, v in linear.items()}
    agent = agent_with(learning_rate=1e-3, clip=0.2, entropy=0.05, lr_warmup_frac=0.0, **settings)
    for done in (0, 1, 7):
        agent.updates = done
        agent._set_schedules()
        left = 1.0 - done / 10
        assert agent.optimizer.rates["policy"].item() == pytest.approx(1e-3 * left)
        assert agent.scalars["clip"].item() == pytest.approx(0.2 * left)
        assert agent.scalars["entropy_weight"].item() == pytest.approx(0.05 * left)


def test_the_adaptive_factor_multiplies_every_rate() -> None:
    agent = agent_with(learning_rate=1e-3, lr_adaptive_kl=0.01, lr_warmup_frac=0.0)
    agent.adaptive.factor.fill_(0.25)
    agent._set_schedules()
    assert [r.item() for r in agent.optimizer.rates.values()] == pytest.approx([0.25e-3] * 2)


@pytest.mark.parametrize(("multiple", "stops"), [(1.4, False), (1.6, True)])
def test_an_update_stops_beyond_one_and_a_half_times_the_target(
    multiple: float, stops: bool
) -> None:
    settings = {"ppo_epochs": 2, "minibatches": 1, "learning_rate": 1e-2, "lr_warmup_frac": 0.0}
    free = agent_with(**settings, target_kl=1e6)
    step, divergences = free._minibatch_step, []

    def measured(*arguments):
        metrics, stopped = step(*arguments)
        divergences.append(metrics["approx_kl"].item())
        return metrics, stopped

    free._minibatch_step = measured
    free.update(rollout_of(free))
    assert divergences[1] > 0.0
    bound = agent_with(**settings, target_kl=divergences[1] / multiple)
    bound.update(rollout_of(bound))
    assert same_bits(weights(bound), weights(free)) is not stops


def test_an_overflow_skips_the_step_and_refuses_nothing(monkeypatch) -> None:
    agent = agent_with(ppo_epochs=1, minibatches=1)
    before = weights(agent)
    overflow = torch.ones((), dtype=torch.bool)
    monkeypatch.setattr(gradients, "_overflow", lambda *arguments: overflow)
    agent.update(rollout_of(agent))
    value = {name for name in before if "value" in name}
    assert all(torch.equal(before[n], weights(agent)[n]) for n in before if n not in value)
    assert agent.refusal is None


def test_the_rate_adapts_to_the_divergence_of_the_last_epoch() -> None:
    agent = agent_with(ppo_epochs=2, minibatches=1, lr_adaptive_kl=0.01)
    agent._adapt_learning_rate([{"approx_kl": torch.tensor(x)} for x in (1.0, 1e-4)])
    assert agent.adaptive.factor.item() == pytest.approx(1.5)


def test_rescaling_the_value_layer_preserves_its_outputs() -> None:
    """In the units of the rewards, while the moments of returns move."""
    agent, layer = agent_with(), torch.nn.Linear(5, 1)
    draws = torch.Generator().manual_seed(3)
    inputs = torch.randn(40, 5, generator=draws)
    agent.return_moments.update(torch.randn(50, generator=draws))
    with torch.no_grad():
        before = agent.return_moments.restore(layer(inputs))
        agent._rescale_value_layer(4.0 + 9.0 * torch.randn(50, generator=draws), layer)
        assert agent.return_moments.deviation.item() > 3.0
        after = agent.return_moments.restore(layer(inputs))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_steps_that_only_reset_do_not_count() -> None:
    agent = agent_with()
    rollout = rollout_of(agent)
    x = torch.arange(6.0).view(2, 3)
    assert agent.without_resets(x, rollout) is x
    rollout.valid = torch.tensor([[True, False, True], [True, True, False]])
    expected = torch.tensor([[0.0, math.nan, 2.0], [3.0, 4.0, math.nan]])
    torch.testing.assert_close(agent.without_resets(x, rollout), expected, equal_nan=True)


def test_a_loaded_agent_continues_its_count_and_its_rate() -> None:
    agent = agent_with(lr_adaptive_kl=0.01)
    agent.update(rollout_of(agent))
    agent.updates = 7
    agent.adaptive.factor.fill_(2.25)
    other = agent_with(seed=1, lr_adaptive_kl=0.01)
    other.load_state(copy.deepcopy(agent.state()))
    assert other.updates == 7
    assert other.adaptive.factor.item() == 2.25
    assert same_bits(everything(other), everything(agent))


def test_a_weight_that_no_loss_depends_on_is_checked_too() -> None:
    """A head that no op of the rollout uses: its NaN would go unnoticed into checkpoints."""
    agent = agent_with()
    rollout = rollout_of(agent)
    rollout.actions[..., 0] = Op.WAIT
    with torch.no_grad():
        dict(agent.policy.named_parameters())["choice_heads.alpha_curve.bias"][0] = math.nan
    before = weights(agent)
    agent.update(rollout)
    assert agent.refusal.tensor == "policy/choice_heads.alpha_curve.bias"
    assert all(torch.equal(before[n].nan_to_num(), weights(agent)[n].nan_to_num()) for n in before)
