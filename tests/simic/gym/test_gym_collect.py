"""Rollouts across the ends of episodes, compared with a loop over single environments in float64.

The reference handles one environment at a time: its LSTM starts from zeros in each episode, its
advantages are sums over the rest of the episode, and it uses neither padding nor masks.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from esper.simic.gym.collect import collect
from esper.simic.gym.vector_environment import GymEnvironments
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.recurrent import FlatObservation, RecurrentPolicy
from scripted_gym import OPTIONS, agent_for, scripted

ENVS, STEPS, ROLLOUTS, DISCOUNT, DECAY = 5, 13, 3, 0.9, 0.8
SETTINGS = {"discount": DISCOUNT, "trace_decay": DECAY, "ppo_epochs": 2, "minibatches": 3}


def cell(lstm: torch.nn.LSTM, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of an LSTM, equations of Hochreiter and Schmidhuber with a forget gate."""
    w_x, w_h, b_x, b_h = (p.double() for p in lstm.parameters())
    gates = w_x @ x + b_x + w_h @ h + b_h
    i, f, g, o = gates.chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class Alone:
    """The policy for one environment, computed step by step in float64."""

    def __init__(self, policy: RecurrentPolicy):
        self.policy = policy.double()
        self.forget()

    def forget(self) -> None:
        width = self.policy.memory_width
        self.state = [(torch.zeros(width).double(),) * 2 for _ in self.policy.trunks]

    def see(self, x: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor]:
        """Log-probs of the legal options of each head, and the value."""
        outputs = []
        for i, trunk in enumerate(self.policy.trunks):
            if trunk.lstm is None:
                outputs.append(trunk.encoder(x))
                continue
            h, c = cell(trunk.lstm, trunk.encoder(x), *self.state[i])
            self.state[i] = h, c
            outputs.append(4.0 * h)
        first = self.policy.trunks[0]
        beside = [] if first.lstm is None else [first.encoder(x)]
        hidden = self.policy.actor(torch.cat([outputs[0], *beside]))
        log_probs = []
        for head, count in enumerate(OPTIONS):
            logits = self.policy.action_heads[str(head)](hidden)
            legal = logits.exp() * mask[head, :count]
            log_probs.append((legal / legal.sum()).log())
        return log_probs, self.policy.value_head(outputs[-1])[0]


@dataclass
class Pass:
    """Consecutive rollouts with the agent's state at the start of each."""

    agent: PPOAgent
    environments: GymEnvironments
    rollouts: list[Rollout]
    means: list[tuple[Tensor, Tensor]]


def passed(update: bool, **settings) -> Pass:
    environments = scripted(ENVS)
    agent = agent_for(environments, **SETTINGS, **settings)
    rollouts, means = [], []
    for number in range(ROLLOUTS):
        moments = agent.moments.features
        means.append((moments.mean.clone(), moments.deviation.clone()))
        rollouts.append(collect(environments, agent, STEPS, number))
        agent.moments.update(rollouts[-1].observation, rollouts[-1].valid)
    return Pass(agent, environments, rollouts, means)


@pytest.fixture(params=["separate", "shared", "memoryless"])
def run(request) -> Pass:
    kind = {"memory": "none"} if request.param == "memoryless" else {"critic": request.param}
    return passed(False, **kind)


def first_rollout() -> tuple[PPOAgent, Rollout]:
    environments = scripted(ENVS)
    agent = agent_for(environments, **SETTINGS)
    return agent, collect(environments, agent, STEPS, 0)


def steps_of(run: Pass, n: int):
    """The environment's own record: a list of episodes, each a list of steps."""
    return [episode["steps"] for episode in run.environments.environments[n].log]


def test_rollouts_equal_those_of_single_environments(run: Pass) -> None:
    """Rewards, ends, actions, log-probs, values, and V of final observations."""
    alone = Alone(run.agent.policy)
    ends = {"terminated": 0, "truncated": 0}
    for n in range(ENVS):
        episodes, episode, t_in_episode = steps_of(run, n), 0, 0
        alone.forget()
        begun = True
        for number, rollout in enumerate(run.rollouts):
            for t in range(STEPS):
                mean, deviation = run.means[number]
                seen = rollout.observation.features[t, n].double()
                x = ((seen - mean) / deviation).clamp(-10.0, 10.0)
                mask = rollout.observation.masks[t, n].double()
                log_probs, value = alone.see(x, mask)
                assert float(rollout.values[t, n]) == pytest.approx(value.item(), abs=1e-5)
                if not begun:  # a final observation: only V is used
                    assert not rollout.valid[t, n]
                    assert float(rollout.rewards[t, n]) == 0.0
                    alone.forget()
                    begun, t_in_episode, episode = True, 0, episode + 1
                    continue
                assert rollout.valid[t, n]
                step = episodes[episode][t_in_episode]
                assert rollout.actions[t, n].tolist() == step["action"]
                expected = sum(
                    part[choice] for part, choice in zip(log_probs, step["action"], strict=True)
                )
                assert float(rollout.log_prob[t, n]) == pytest.approx(expected.item(), abs=1e-5)
                assert float(rollout.rewards[t, n]) == pytest.approx(step["reward"], rel=1e-6)
                t_in_episode += 1
                over = t_in_episode == len(episodes[episode]) and not (
                    episode + 1 == len(episodes) and not run.environments.over[n]
                )
                ended = bool(rollout.terminated[t, n]) + bool(rollout.truncated[t, n])
                assert ended == over
                ends["terminated"] += bool(rollout.terminated[t, n])
                ends["truncated"] += bool(rollout.truncated[t, n])
                begun = not over
    assert min(ends.values()) > 5


def naive_advantages(rollout: Rollout, values: Tensor, last: Tensor) -> Tensor:
    """Sums over the rest of each episode: ``A_t = sum_k (gamma lambda)^k delta_{t+k}``."""
    advantages = torch.full((STEPS, ENVS), float("nan"), dtype=torch.float64)
    for n in range(ENVS):
        for t in range(STEPS):
            if not rollout.valid[t, n]:
                continue
            total, factor = 0.0, 1.0
            for k in range(t, STEPS):
                following = float(values[k + 1, n] if k + 1 < STEPS else last[n])
                bootstrap = 0.0 if rollout.terminated[k, n] else following
                delta = float(rollout.rewards[k, n]) + DISCOUNT * bootstrap - float(values[k, n])
                total += factor * delta
                factor *= DISCOUNT * DECAY
                if rollout.terminated[k, n] or rollout.truncated[k, n]:
                    break
            advantages[t, n] = total
    return advantages


def test_advantages_and_sequences_equal_those_of_single_episodes(run: Pass) -> None:
    """Also the masked normalisation and the padded sequences with their initial state."""
    agent = run.agent
    # Values are normalised by these moments alone.
    agent.return_moments.update(torch.tensor([1.0, 3.0, 8.0]))
    agent.updates = 1
    for rollout in run.rollouts:
        learning = agent._prepare_batch(rollout)
        values, last = rollout.with_cut_offs(
            agent.return_moments.restore(rollout.values),
            agent.return_moments.restore(rollout.last_value),
        )
        values, last = values.double(), last.double()
        advantages = naive_advantages(rollout, values, last)
        known = advantages[rollout.valid]
        expected = (advantages - known.mean()) / known.std(correction=0)
        targets = (advantages + values - agent.return_moments.mean) / agent.return_moments.deviation
        sequences = learning.sequences
        if run.agent.policy.memory_width == 0:
            time, n = rollout.valid.nonzero(as_tuple=True)
            for found, wanted in (
                (sequences.advantages, expected),
                (sequences.targets, targets),
                (sequences.actions, rollout.actions),
                (sequences.observation.masks, rollout.observation.masks),
            ):
                torch.testing.assert_close(
                    found[0].double(), wanted[time, n].double(), atol=1e-5, rtol=1e-5
                )
            continue
        found = 0
        for m in range(sequences.count):
            length = int(sequences.counts[m])
            if length == 0:
                continue  # from a window the critic alone learns
            n, begin = piece_of(agent, rollout, sequences, m)
            rows = slice(begin, begin + length)
            found += length
            inside = slice(0, length)
            torch.testing.assert_close(
                sequences.advantages[inside, m].double(), expected[rows, n], atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(
                sequences.targets[inside, m].double(), targets[rows, n], atol=1e-5, rtol=1e-5
            )
            assert torch.equal(sequences.actions[inside, m], rollout.actions[rows, n])
            assert torch.equal(
                sequences.observation.masks[inside, m], rollout.observation.masks[rows, n]
            )
            assert sequences.weight[:, m].tolist() == [1.0] * length + [0.0] * (
                len(sequences.weight) - length
            )
            assert begin == 0 or not rollout.valid[begin - 1, n]
            assert begin + length == STEPS or not rollout.valid[begin + length, n]
            for state, whole in zip(sequences.hidden, rollout.hidden, strict=True):
                wanted = whole[:, n] if begin == 0 else torch.zeros_like(whole[:, n])
                assert torch.equal(state[:, m], wanted)
        assert found == int(rollout.valid.sum())


def piece_of(agent: PPOAgent, rollout: Rollout, sequences, m: int) -> tuple[int, int]:
    """Environment and first step of a sequence, found by its first observation."""
    features = agent.moments.normalise(rollout.observation).features
    place = (features == sequences.observation.features[0, m]).all(-1) & rollout.valid
    ((t, n),) = place.nonzero().tolist()
    return n, t


def test_padded_sequences_give_the_outputs_of_acting(run: Pass) -> None:
    agent, rollout = run.agent, run.rollouts[-1]
    agent.return_moments.update(torch.tensor([1.0, 3.0, 8.0]))
    mean, deviation = run.means[-1]  # use the moments of the time of acting
    then = ((rollout.observation.features - mean) / deviation).clamp(-10, 10).float()
    whole = rollout.observation.features
    agent.moments.normalise = lambda seen: FlatObservation(
        then if seen.features is whole else seen.features, seen.masks
    )
    sequences = agent._prepare_batch(rollout).sequences
    evaluation = agent.policy.evaluate_actions(
        sequences.observation, sequences.actions, sequences.hidden
    )
    inside = slice(None) if sequences.weight is None else sequences.weight > 0
    torch.testing.assert_close(
        evaluation.log_prob[inside], sequences.old_log_prob[inside], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16])
def test_the_ratio_is_one_at_the_first_minibatch_of_every_round(amp_dtype) -> None:
    environments = scripted(ENVS)
    agent = agent_for(environments, **SETTINGS, learning_rate=1e-2)
    agent.policy.amp_dtype = amp_dtype
    bound = 1e-5 if amp_dtype is None else 0.05
    for number in range(3):
        summary = agent.update(collect(environments, agent, STEPS, number))
        assert summary["first_ratio_max"] == pytest.approx(1.0, abs=bound)
        assert summary["first_kl"] == pytest.approx(0.0, abs=bound)
        assert summary["approx_kl"] > 1e-6


def test_contents_of_resetting_steps_do_not_affect_the_update() -> None:
    """Weights, moments and metrics have the same bits whatever these steps contain."""
    agents, summaries = [], []
    for poisoned in (False, True):
        agent, rollout = first_rollout()
        dead = ~rollout.valid
        assert int(dead.sum()) > 5
        if poisoned:
            rollout.rewards[dead] = 1e6
            rollout.log_prob[dead] = -1e6
            rollout.actions[dead] = 0
            rollout.values[dead] = 1e6
            # The observation is used after a truncated step, and nowhere else.
            behind = torch.zeros_like(dead)
            behind[1:] = rollout.terminated[:-1]
            rollout.observation.features[dead & behind] = 1e6
        summaries.append(agent.update(rollout))
        agents.append(agent)
    assert summaries[0] == summaries[1]
    states = [agent.state() for agent in agents]
    for name, tensor in states[0]["policy"].items():
        assert torch.equal(tensor, states[1]["policy"][name]), name
    for part in ("features", "return"):
        for name, tensor in states[0]["moments"][part].items():
            assert torch.equal(tensor, states[1]["moments"][part][name]), (part, name)


def test_the_value_after_a_truncated_step_is_bootstrapped() -> None:
    agent, rollout = first_rollout()
    before = agent._prepare_batch(rollout).sequences.advantages
    behind = torch.zeros_like(rollout.truncated)
    behind[1:] = rollout.truncated[:-1]
    rollout.observation.features[behind] += 5.0
    assert not torch.equal(before, agent._prepare_batch(rollout).sequences.advantages)


def test_moments_are_exact_over_valid_steps_and_constant_during_a_rollout() -> None:
    environments = scripted(ENVS)
    agent = agent_for(environments, **SETTINGS)
    seen = []
    for number in range(2):
        frozen: set[tuple] = set()

        def note(step, frozen=frozen) -> None:
            moments = agent.moments.features
            frozen.add((*moments.mean.tolist(), *moments.deviation.tolist()))

        rollout = collect(environments, agent, STEPS, number, note)
        assert len(frozen) == 1
        agent.update(rollout)
        seen.append(rollout.observation.features[rollout.valid].double())
    whole = torch.cat(seen)
    torch.testing.assert_close(agent.moments.features.mean, whole.mean(0))
    expected = whole.var(0, correction=0).sqrt()
    torch.testing.assert_close(agent.moments.features.deviation, expected)


def test_only_a_policy_with_memory_depends_on_the_past() -> None:
    observation = scripted(ENVS).observation
    for memory in ("none", "lstm"):
        agent = agent_for(scripted(ENVS), memory=memory)
        agent.moments.update(observation, None)
        answers = []
        for past in (0.0, 3.0):
            agent.begin(torch.arange(ENVS), 0)
            agent.act(FlatObservation(observation.features + past, observation.masks), 0)
            answers.append(agent.act(observation, 1)[2])
        assert torch.equal(*answers) == (memory == "none")


def test_resetting_one_recurrent_state_keeps_the_others() -> None:
    agent = agent_for(scripted(ENVS))
    agent.act(scripted(ENVS).observation, 0)
    before = [state.clone() for state in agent.hidden]
    rows = torch.tensor([True, False, False, True, False])
    agent.reset_state(rows)
    for state, then in zip(agent.hidden, before, strict=True):
        assert bool((state[:, rows] == 0.0).all())
        assert torch.equal(state[:, ~rows], then[:, ~rows])
        assert bool((then[:, rows] != 0.0).any())


def test_rescaling_the_value_layer_preserves_the_critics_values() -> None:
    """Rewards a hundred times as large change the moments but not the critic's values."""
    environments = scripted(ENVS)
    still = {**SETTINGS, "learning_rate": 1e-30, "normalise_observations": False}
    agent = agent_for(environments, **still)
    agent.update(collect(environments, agent, STEPS, 0))
    rollout = collect(environments, agent, STEPS, 1)
    rollout.rewards *= 100.0
    seen = FlatObservation(rollout.observation.features[0], rollout.observation.masks[0])

    def opinion() -> Tensor:
        agent.begin(torch.arange(ENVS), 0)
        return agent.return_moments.restore(agent.value(seen))

    before, deviation = opinion(), float(agent.return_moments.deviation)
    agent.update(rollout)
    assert float(agent.return_moments.deviation) > 20.0 * deviation
    torch.testing.assert_close(opinion(), before, rtol=1e-4, atol=1e-4 * deviation)


def test_returns_of_the_first_round_use_their_own_moments() -> None:
    """Unnormalised returns would dominate the actor's gradient."""
    agent, rollout = first_rollout()
    rollout.rewards *= 1000.0
    assert agent.update(rollout)["value_loss"] < 1.0
