"""Batches of recorded episodes, and their way to the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.actions import HEADS
from esper.simic.advantage import generalised_advantages
from esper.simic.records.episodes import Episodes
from esper.simic.trainer import Batch, SlotFeatures

_SEED, _BLUEPRINT = HEADS.index("slot"), HEADS.index("blueprint")
_CHOICES = [i for i in range(len(HEADS)) if i not in (_SEED, _BLUEPRINT)]


def batch_of(
    episodes: Episodes, returns: Tensor, indices: Tensor, groups: Tensor | None = None
) -> Batch:
    """The episodes ``indices``, int64 ``[B]``, cut to the longest of them.

    Args:
        episodes: M episodes.
        returns: of each of their steps, see ``monte_carlo_returns``, ``[T, M]``.
        indices: indices of episodes.
        groups: see ``groups_of``, which is called if this is None.
    """
    groups = groups_of(episodes) if groups is None else groups
    length = int(episodes.lengths[indices].max())

    def part(x: Tensor) -> Tensor:
        return x[:length].index_select(1, indices)

    observation, actions = episodes.observation, part(episodes.actions)
    return Batch(
        features=SlotFeatures(
            part(observation.slots),
            part(observation.blueprints),
            part(observation.masks.slots),
            part(observation.masks.kinds),
        ),
        metric_sequence=part(observation.host),
        seed_idx=actions[..., _SEED],
        blueprint_idx=actions[..., _BLUEPRINT],
        returns=part(returns),
        choices=actions[..., _CHOICES],
        critic=part(observation.critic),
        rewards=part(episodes.rewards),
        terminated=part(episodes.terminated),
        log_prob=part(episodes.log_prob),
        weight=part(episodes.valid.to(returns.dtype)),
        group=groups[indices],
    )


def monte_carlo_returns(episodes: Episodes, discount: float) -> Tensor:
    """Sum of the discounted rewards of the episode from each step on, ``[T, M]``."""
    rewards = episodes.rewards
    nothing = torch.zeros_like(rewards)
    _, returns = generalised_advantages(
        rewards, nothing, nothing[0], episodes.terminated, discount, trace_decay=1.0
    )
    return returns


class _EpisodeData(Dataset[Batch]):
    """Makes a whole batch at a time."""

    def __init__(self, episodes: Episodes, returns: Tensor):
        self.episodes, self.returns = episodes, returns
        self.groups = groups_of(episodes)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        return batch_of(self.episodes, self.returns, torch.tensor(indices), self.groups)


def _same_batch(batch: Any) -> Any:
    """Replaces the loader's collation: the data make whole batches."""
    return batch


class EpisodeLoader:
    """Loads batches of episodes for a device, in page-locked memory where it is a CUDA device.

    Args:
        episodes: the episodes.
        returns: returns of their steps, ``[T, M]``.
        device: the device that the batches will be copied to.
    """

    def __init__(self, episodes: Episodes, returns: Tensor, device: torch.device):
        self._data, self._pin = _EpisodeData(episodes, returns), device.type == "cuda"

    def batches(self, indices: Tensor, size: int, whole_groups: bool = False) -> DataLoader[Batch]:
        """Batches of the episodes ``indices``, in this order, of at most ``size`` episodes each.

        Batches are of nearly equal size, so that a compiled step meets few shapes.

        Args:
            indices: indices of episodes, int64 ``[M]``.
            size: largest number of episodes.
            whole_groups: whether the episodes of a group stay together, where the first of them
                is; a batch may then be larger by less than a group, or be a group.
        """
        count = -(-len(indices) // size)
        parts: Sequence[Tensor] = indices.tensor_split(count)
        if whole_groups:
            parts = _in_whole_groups(indices, self._data.groups[indices], count)
        index_lists = [part.tolist() for part in parts]
        return DataLoader(
            self._data, batch_sampler=index_lists, collate_fn=_same_batch, pin_memory=self._pin
        )


def _in_whole_groups(indices: Tensor, groups: Tensor, count: int) -> list[Tensor]:
    """``indices [M]`` in at most ``count`` parts, each of whole ``groups``, int64 ``[M]``."""
    _, group, sizes = groups.unique(return_inverse=True, return_counts=True)
    first = first_of(group)
    order = first[group].argsort(stable=True)
    in_order = first.argsort()
    begin = torch.empty_like(sizes)
    begin[in_order] = sizes[in_order].cumsum(0) - sizes[in_order]
    part = begin[group[order]] * count // len(indices)
    return [members for i in range(count) if len(members := indices[order[part == i]])]


def epoch_order(indices: Tensor, seed: int, epoch: int) -> Tensor:
    """``indices [M]`` in the order of an epoch: a pure function of seed and epoch."""
    draws = random_bits(seed, torch.zeros(1), Purpose.POLICY_SHUFFLE, epoch, 0, len(indices))
    return indices[draws[0].argsort(stable=True)]


def split(episodes: Episodes, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Divide episodes into those to learn from and those that are held out.

    Episodes of the same run, round and twin share host and data, so they stay together.

    Args:
        episodes: M episodes.
        share: part of the episodes to hold out. At least one group is held out if the share is
            above 0, and at least one is left.
        seed: seed of the choice.

    Returns:
        indices of either, int64, in the order of the episodes.
    """
    group = groups_of(episodes)
    groups = int(group.max()) + 1
    draws = random_bits(seed, torch.zeros(1), Purpose.HELD_OUT, 0, 0, groups)[0]
    order = draws.argsort(stable=True)
    ends = torch.bincount(group)[order].cumsum(0)
    count = int((ends <= share * len(group)).sum())
    if share > 0.0:
        count = min(max(count, 1), groups - 1)
    held_out = torch.isin(group, order[:count])
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def groups_of(episodes: Episodes) -> Tensor:
    """Number of each episode's group, from 0: those of one run, round and twin; int64 ``[M]``.

    The episodes of a group share host and data.
    """
    keys = list(zip(episodes.runs, episodes.rounds.tolist(), episodes.twins.tolist(), strict=True))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys])


def first_of(groups: Tensor) -> Tensor:
    """Place of the first episode of each group, int64 ``[G]``.

    Args:
        groups: number of each episode's group, all numbers from 0 to G - 1, int64 ``[M]``.
    """
    count = len(groups)
    first = groups.new_full((int(groups.max()) + 1,), count)
    return first.scatter_reduce(0, groups, torch.arange(count), "amin")
