"""Recorded episodes without a host: what the tests of learning from records share."""

from pathlib import Path

import torch
from torch import Tensor

from esper.simic.offline.batches import batch_of, monte_carlo_returns
from esper.simic.records.episodes import Episodes
from esper.simic.rollout import Rollout
from esper.simic.trainer import Batch
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.random_actor import RandomActor
from synthetic import picked, random_observation


def synthetic_episodes(
    lengths: list[int], slots: int = 3, seed: int = 0, observation: Observation | None = None
) -> Episodes:
    """Episodes in which a random policy acts on random observations; two share each twin.

    Steps that pad an episode repeat its first step without reward, as in ``read_episodes``.
    """
    longest, count = max(lengths), len(lengths)
    seen = observation or random_observation((longest, count), slots, seed)
    actor = RandomActor(seed)
    actor.begin(torch.arange(count), 0)
    acted = [actor.act(picked(seen, t), t) for t in range(longest)]
    actions, log_prob = (torch.stack(part) for part in list(zip(*acted, strict=True))[:2])
    rewards = torch.randn(longest, count, generator=torch.Generator().manual_seed(seed))
    steps, ends = torch.arange(longest)[:, None], torch.tensor(lengths)
    valid = steps < ends
    place = torch.where(valid, steps, 0)

    def padded(x: Tensor) -> Tensor:
        return x[place, torch.arange(count)]

    return Episodes(
        observation=Observation.from_tensors({n: padded(x) for n, x in seen.tensors().items()}),
        actions=padded(actions), log_prob=padded(log_prob),
        values=torch.full((longest, count), float("nan")), rewards=rewards * valid,
        terminated=steps == ends - 1, truncated=torch.zeros(longest, count, dtype=torch.bool),
        twin_scores=torch.zeros(longest, count), lengths=ends, environments=torch.arange(count),
        rounds=torch.ones(count, dtype=torch.long), twins=torch.arange(count) // 2,
        tasks=["task"] * count, draws=["task"] * count, runs=[Path("run")] * count,
        policies=["random"] * count,
    )  # fmt: skip


def episodes_of(rollout: Rollout[Observation]) -> Episodes:
    """The episodes of a rollout of whole episodes, as if they had been recorded."""
    steps, count = rollout.actions.shape[:2]
    episodes = synthetic_episodes([steps] * count, observation=rollout.observation)
    names = ("actions", "log_prob", "rewards", "terminated", "truncated")
    for name in names:
        object.__setattr__(episodes, name, getattr(rollout, name))
    return episodes


def whole_batch(episodes: Episodes, discount: float = 1.0) -> Batch:
    """All episodes as one batch."""
    returns = monte_carlo_returns(episodes, discount)
    return batch_of(episodes, returns, torch.arange(episodes.count))
