"""The vine: branches, expected return and its gradient, against a tree that is walked by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline.config.offline import OfflineConfig
from esper.leyline.metrics import Metric
from esper.simic.normalise import RunningMoments
from esper.simic.offline.batches import EpisodeLoader, groups_of
from esper.simic.offline.methods import Vine, branches, loss_of, relative
from esper.simic.records.episodes import Episodes
from esper.simic.trainer import Batch
from esper.tamiyo.policy.interface import Evaluation
from recorded_episodes import synthetic_episodes, whole_batch
from synthetic import CPU


def grouped(groups: list[int], paths: list[str], lengths: list[int] | None = None) -> Episodes:
    """Episodes of given groups; letter t of a path is the action of step t."""
    steps = lengths or [len(path) for path in paths]
    episodes = synthetic_episodes(steps)
    actions = torch.zeros_like(episodes.actions)
    for i, path in enumerate(paths):
        for t in range(len(actions)):
            actions[t, i, 1] = ord(path[t] if t < len(path) else path[0]) - ord("a")
    return replace(episodes, actions=actions, twins=torch.tensor(groups))


def walked(log_prob: Tensor, paths: list[str], groups: list[int]) -> tuple[Tensor, Tensor]:
    """``branches`` by dictionaries: log-prob of staying, and log-prob of each episode."""
    stay = torch.zeros_like(log_prob)
    followed = torch.zeros(len(paths))
    for i, path in enumerate(paths):
        for t in range(len(path)):
            here = [
                j
                for j, other in enumerate(paths)
                if groups[j] == groups[i] and len(other) > t and other[:t] == path[:t]
            ]
            options: dict[str, list[float]] = {}
            for j in here:
                options.setdefault(paths[j][t], []).append(math.exp(float(log_prob[t, j])))
            total = sum(sum(found) / len(found) for found in options.values())
            stay[t, i] = math.log(total)
            followed[i] += float(log_prob[t, i]) - math.log(total)
        copies = sum(groups[j] == groups[i] and paths[j] == path for j in range(len(paths)))
        followed[i] -= math.log(copies)
    return stay, followed


PATHS = ["aaba", "aaba", "abaa", "abca", "aca", "aaba", "abaa"]
GROUPS = [0, 0, 0, 0, 0, 1, 1]


def consistent_log_prob(paths: list[str], groups: list[int]) -> Tensor:
    """Log-probs that agree where episodes of a group have taken the same actions."""
    longest = max(map(len, paths))
    found = torch.full((longest, len(paths)), -0.3)
    for i, path in enumerate(paths):
        for t in range(len(path)):
            seed = sum(ord(letter) * 7**k for k, letter in enumerate(path[: t + 1])) + groups[i]
            found[t, i] = -0.1 - float(torch.rand(1, generator=torch.Generator().manual_seed(seed)))
    return found


def test_branches_are_those_of_a_tree_walked_step_by_step() -> None:
    batch = whole_batch(grouped(GROUPS, PATHS))
    log_prob = consistent_log_prob(PATHS, GROUPS)
    stay, chosen = branches(log_prob, batch)
    expected_stay, expected = walked(log_prob, PATHS, GROUPS)
    torch.testing.assert_close(stay * batch.weight, expected_stay * batch.weight)
    torch.testing.assert_close(chosen, expected)
    for group in (0, 1):
        own = torch.tensor(GROUPS) == group
        assert float(chosen[own].exp().sum()) == pytest.approx(1.0, abs=1e-6)


def evaluation_of(log_prob: Tensor, batch: Batch) -> Evaluation:
    heads = (*batch.actions.shape,)
    return Evaluation(
        log_prob, torch.zeros(heads), torch.zeros(heads, dtype=torch.bool), torch.zeros(heads[:2])
    )


def test_the_gradient_is_that_of_the_expected_return() -> None:
    """Against a softmax over the branches of one decision, whose gradient is known."""
    paths, groups = ["ab", "ac", "ad"], [0, 0, 0]
    episodes = grouped(groups, paths)
    batch = whole_batch(episodes)
    logits = torch.tensor([0.3, -0.2, 1.0], requires_grad=True)
    log_prob = torch.stack([torch.zeros(3), logits.log_softmax(0)])
    moments = RunningMoments((), CPU)
    loss, metrics = Vine(0.0, moments, 0.5, 0.0)(evaluation_of(log_prob, batch), batch)
    (found,) = torch.autograd.grad(loss, logits)
    p, u = logits.detach().softmax(0), moments.scale(batch.returns)[0]
    advantage = u - (p * u).sum()
    torch.testing.assert_close(found, -p * advantage / 0.5)
    gain = float((p * (u - u.mean())).sum())
    assert float(metrics[Metric.EXPECTED_GAIN]) == pytest.approx(gain, abs=1e-6)


def test_entropy_moves_a_branch_that_is_almost_never_taken() -> None:
    batch = whole_batch(grouped([0, 0], ["ab", "ac"]))
    moments = RunningMoments((), CPU)
    found = {}
    for entropy in (0.0, 0.1):
        logits = torch.tensor([0.0, -30.0], requires_grad=True)
        log_prob = torch.stack([torch.zeros(2), logits.log_softmax(0)])
        loss, _ = Vine(0.0, moments, 0.5, entropy)(evaluation_of(log_prob, batch), batch)
        found[entropy] = float(torch.autograd.grad(loss, logits)[0][1])
    assert abs(found[0.0]) < 1e-9
    assert found[0.1] == pytest.approx(-0.05, abs=1e-4)


def test_where_all_episodes_agree_it_is_cloning() -> None:
    batch = whole_batch(grouped([0, 0, 1], ["aba", "aba", "abb"]))
    log_prob = consistent_log_prob(["aba", "aba", "abb"], [0, 0, 1])
    stay, chosen = branches(log_prob, batch)
    torch.testing.assert_close(stay, log_prob)
    torch.testing.assert_close(chosen.exp(), torch.tensor([0.5, 0.5, 1.0]))


def test_returns_are_compared_within_groups() -> None:
    found = relative(torch.tensor([1.0, 3.0, 10.0]), torch.tensor([4, 4, 2]))
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0, 0.0]))


def test_batches_hold_whole_groups() -> None:
    episodes = grouped([0, 0, 0, 1, 1, 2, 2, 2, 3], ["ab"] * 9)
    groups = groups_of(episodes)
    returns = torch.zeros(2, 9)
    loader = EpisodeLoader(episodes, returns, CPU)
    order = torch.tensor([8, 5, 0, 3, 6, 1, 4, 7, 2])
    found = [batch.group.tolist() for batch in loader.batches(order, 4, whole_groups=True)]
    assert sorted(group for batch in found for group in batch) == sorted(groups.tolist())
    for one in found:
        others = [g for batch in found if batch is not one for g in batch]
        assert not set(one) & set(others)
    assert found[0][0] == groups[8], "in the order of the first of each group"
    assert [len(batch) for batch in found] == [4, 3, 2]
    parts = loader.batches(order, 4)
    assert [len(batch.group) for batch in parts] == [3, 3, 3]


def test_the_settings_choose_it() -> None:
    moments = RunningMoments((), CPU)
    config = OfflineConfig(method="vine", temperature=0.7, entropy=0.2)
    assert loss_of(config, moments) == Vine(0.5, moments, 0.7, 0.2)
