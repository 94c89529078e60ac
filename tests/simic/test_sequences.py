"""Splitting rollouts in which episodes begin and end into sequences."""

import pytest
import torch
from torch import Tensor

from esper.simic.graphs import pick_padded
from esper.simic.gym.collect import collect
from esper.simic.rollout import segments, split_sequences
from scripted_gym import agent_for, scripted


def naive_segments(valid: list[list[bool]]) -> list[tuple[int, int, int]]:
    found = []
    for n in range(len(valid[0])):
        t = 0
        while t < len(valid):
            if not valid[t][n]:
                t += 1
                continue
            end = t
            while end < len(valid) and valid[end][n]:
                end += 1
            found.append((t, n, end - t))
            t = end
    return found


@pytest.mark.parametrize("seed", range(20))
def test_segments_equal_those_of_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(9, 5, generator=generator) < 0.7
    found: list[Tensor] = list(segments(valid))
    rows = list(zip(*(x.tolist() for x in found), strict=True))
    assert rows == naive_segments(valid.tolist())


def test_each_piece_of_an_episode_has_its_own_steps_and_recurrent_state() -> None:
    """Numbers name their step and environment. Only a piece at step 0 goes on with a state."""
    environments = scripted(5)
    agent = agent_for(environments)
    collect(environments, agent, 9, 1)
    rollout = collect(environments, agent, 21, 2)
    assert rollout.valid is not None
    places = 100.0 * torch.arange(21)[:, None] + torch.arange(5)
    found = split_sequences(rollout, rollout.observation, places, places, places)
    pieces = naive_segments(rollout.valid.tolist())
    assert found.weight is not None
    assert found.count == len(pieces) > 10
    for m, (first, environment, length) in enumerate(pieces):
        steps = slice(first, first + length)
        for own, whole in (
            (found.advantages, places),
            (found.old_log_prob, places),
            (found.targets, places),
            (found.actions, rollout.actions),
            *zip(
                found.observation.tensors().values(),
                rollout.observation.tensors().values(),
                strict=True,
            ),
        ):
            assert torch.equal(own[:length, m], whole[steps, environment])
        assert found.weight[:, m].tolist() == [float(t < length) for t in range(len(found.weight))]
        for own, state in zip(found.hidden, rollout.hidden, strict=True):
            expected = state[:, environment] if first == 0 else 0 * state[:, environment]
            assert torch.equal(own[:, m], expected)
    assert any(bool(state.abs().sum() > 0) for state in rollout.hidden)


def test_padding_to_powers_of_two_changes_neither_loss_nor_gradients() -> None:
    environments = scripted(5)
    agent = agent_for(environments)
    rollout = collect(environments, agent, 21, 1)
    agent.updates, shapes = 1, set()
    sequences = agent._prepare_batch(rollout).sequences
    for chosen in torch.randperm(sequences.count).split(3):
        found = []
        for minibatch in (sequences.pick(chosen), pick_padded(sequences, chosen)):
            loss, metrics = agent._gradients(minibatch)
            gradients = [p.grad.clone() for p in agent.policy.parameters() if p.grad is not None]
            found.append([loss, *gradients, *(metrics[n] for n in ("approx_kl", "ratio_max"))])
        for plain, padded in zip(*found, strict=True):
            torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-6)
        shapes.add(minibatch.actions.shape[:2])
    assert all(n & (n - 1) == 0 for shape in shapes for n in shape)
