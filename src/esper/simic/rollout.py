"""The rollout buffer: T steps of N environments, ``[T, N, ...]``, and its sequences.

Sequences are padded so that the LSTM runs over all of them in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from esper.kasmina.transfer import moved
from esper.tamiyo.policy.interface import ObservationT, RecurrentState, inputs_from, named_inputs


class Rollout(Generic[ObservationT]):
    """T steps of each of N environments, preallocated and written in place.

    Attributes:
        observation: observations before each action, not normalised, leading axes ``[T, N]``.
        actions: int64 ``[T, N, heads]``.
        log_prob: log-probability of the actions when they were taken, ``[T, N]``.
        values: the critic's normalised estimates, ``[T, N]``.
        rewards: ``[T, N]``.
        terminated: whether the episode ended with this step, bool ``[T, N]``.
        truncated: whether the episode was cut off after this step, so that the rest of its return
            is estimated, bool ``[T, N]``.
        last_value: the critic's normalised estimate for the state after the last step, ``[N]``.
        last_observation: observation of that state, leading axis ``[N]``; None if the steps of
            every environment are one whole episode.
        hidden: recurrent state before the first step; empty at the start of an episode.
        valid: bool ``[T, N]`` on the CPU, false where a step only reset an environment; None if
            the steps of every environment are one whole episode.
        lag: mean number of updates by which the weights that acted were behind; None if unknown.
        cut_offs: truncated episodes; None if there are none.
    """

    lag: float | None = None
    cut_offs: "CutOffs | None" = None

    def __init__(self, length: int, first: ObservationT, actions: Tensor):
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(length, *like.shape, dtype=like.dtype, device=like.device)

        tensors = first.tensors()
        self.observation: ObservationT = type(first).from_tensors(
            {n: zeros(x) for n, x in tensors.items()}
        )
        per_environment = torch.zeros(len(actions), device=actions.device)
        self.actions = zeros(actions)
        self.log_prob = zeros(per_environment)
        self.values = zeros(per_environment)
        self.rewards = zeros(per_environment)
        self.terminated = zeros(per_environment.bool())
        self.truncated = zeros(per_environment.bool())
        self.last_value = per_environment
        self.last_observation: ObservationT | None = None
        self.hidden: RecurrentState = ()
        self.valid: Tensor | None = None

    @property
    def cut_off(self) -> Tensor | None:
        """``truncated``; None if the steps of every environment are one whole episode."""
        return None if self.valid is None else self.truncated

    def with_cut_offs(self, values: Tensor, last_value: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[T, N]`` and ``[N]`` with those of ``cut_offs`` at final observations."""
        if self.cut_offs is None:
            return values, last_value
        cut = self.cut_offs.values
        both = torch.where(cut.isnan(), torch.cat([values, last_value[None]]), cut)
        return both[:-1], both[-1]

    def tensors(self) -> dict[str, Tensor]:
        """The floating-point tensors by name."""
        tensors = named_inputs(self.observation, self.hidden) | {
            "reward": self.rewards,
            "log_prob": self.log_prob,
            "value": self.values,
            "last_value": self.last_value,
        }
        return {name: x for name, x in tensors.items() if x.is_floating_point()}

    def state(self) -> dict[str, Any]:
        """All tensors of the rollout by name, for a file."""
        names = ("actions", "log_prob", "values", "rewards", "terminated", "truncated")
        fields = {name: getattr(self, name) for name in (*names, "last_value", "hidden", "valid")}
        last = self.last_observation
        return {
            "observation": self.observation.tensors(),
            "last_observation": None if last is None else last.tensors(),
            **fields,
        }

    @classmethod
    def from_state(cls, kind: type[ObservationT], state: dict[str, Any]) -> "Rollout[ObservationT]":
        """The inverse of ``state``; ``kind`` is the class of the observations."""
        rollout = cls.__new__(cls)
        last = state["last_observation"]
        rollout.observation = kind.from_tensors(state["observation"])
        rollout.last_observation = None if last is None else kind.from_tensors(last)
        for name, value in state.items():
            if not name.endswith("observation"):
                setattr(rollout, name, value)
        return rollout

    def write(
        self, t: int, observation: ObservationT, actions: Tensor, log_prob: Tensor, value: Tensor
    ) -> None:
        """Store the observation and the action of step ``t``."""
        storage = self.observation.tensors()
        for name, tensor in observation.tensors().items():
            storage[name][t] = tensor
        self.actions[t] = actions
        self.log_prob[t] = log_prob
        self.values[t] = value

    def outcome(self, t: int, reward: Tensor, done: bool) -> None:
        """Store the reward of step ``t``; ``done`` marks it as terminated, not truncated."""
        self.rewards[t] = reward.to(self.rewards.dtype)
        self.terminated[t] = done


@dataclass(frozen=True, slots=True)
class CutOffs:
    """Truncated episodes of a rollout, see ``simic.gym.cut_offs``.

    Attributes:
        first, environment, lengths: the windows before their final observations, in which the
            critic starts with an empty memory, int64 ``[M]`` on the CPU.
        final: whether a step observes a final observation, bool ``[T, N]`` on the CPU.
        values: those of final observations, in units of reward, ``[T + 1, N]``; NaN elsewhere.
    """

    first: Tensor
    environment: Tensor
    lengths: Tensor
    final: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Sequences(Generic[ObservationT]):
    """M sequences, padded to L steps; leading axes ``[L, M]``.

    Attributes:
        observation: normalised.
        actions: int64 ``[L, M, heads]``.
        old_log_prob: log-probability of the actions relative to which the loss takes importance
            ratios, see ``Estimates``.
        advantages: normalised.
        targets: normalised value targets.
        hidden: recurrent state before each sequence, tensors ``[layers, M, width]``.
        weight: 1 for steps to learn from, 0 in padding; None if there is no padding.
        lengths: steps of each sequence, int64 ``[M]`` on the CPU; None if all have ``L``.
        critic_weight: ``weight`` for the critic, which learns from final observations and windows
            too; None if it is the same.
        counts: steps of each sequence with a ``weight``, int64 ``[M]`` on the CPU; None if all.
    """

    observation: ObservationT
    actions: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    targets: Tensor
    hidden: RecurrentState
    weight: Tensor | None = None
    lengths: Tensor | None = None
    critic_weight: Tensor | None = None
    counts: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.actions.shape[1]

    def pick(self, indices: Tensor) -> "Sequences[ObservationT]":
        """The sequences ``indices``, int64 ``[m]``, cut to the longest of them."""
        length = self.actions.shape[0]
        if self.lengths is not None:
            length = int(self.lengths[indices].max())
        index = moved(indices, self.actions.device)
        lengths = None if self.lengths is None else self.lengths[indices]
        return self.selection(index, lambda x: x[:length].index_select(1, index), lengths)

    def selection(
        self, index: Tensor, part: Callable[[Tensor], Tensor], lengths: Tensor | None = None
    ) -> "Sequences[ObservationT]":
        """The sequences ``index``; ``part`` takes them from a tensor ``[T, N, ...]``."""
        tensors = {name: part(x) for name, x in self.observation.tensors().items()}
        return Sequences(
            type(self.observation).from_tensors(tensors),
            part(self.actions),
            part(self.old_log_prob),
            part(self.advantages),
            part(self.targets),
            tuple(state.index_select(1, index) for state in self.hidden),
            None if self.weight is None else part(self.weight),
            lengths,
            None if self.critic_weight is None else part(self.critic_weight),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that an update computes with, by name."""
        tensors = named_inputs(self.observation, self.hidden) | {
            "actions": self.actions,
            "log_prob": self.old_log_prob,
            "advantage": self.advantages,
            "target": self.targets,
        }
        weights = {"weight": self.weight, "critic_weight": self.critic_weight}
        return tensors | {name: x for name, x in weights.items() if x is not None}

    @classmethod
    def from_tensors(
        cls, kind: type[ObservationT], tensors: dict[str, Tensor]
    ) -> "Sequences[ObservationT]":
        """The inverse of ``tensors``, without lengths; ``kind`` is the observations' class."""
        observation, hidden = inputs_from(kind, tensors)
        return cls(
            observation,
            tensors["actions"],
            tensors["log_prob"],
            tensors["advantage"],
            tensors["target"],
            hidden,
            tensors.get("weight"),
            critic_weight=tensors.get("critic_weight"),
        )


def segments(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The unbroken runs of true values in ``valid [T, N]`` (bool, on the CPU).

    Returns:
        first step, environment and length of each run, int64 ``[M]``, sorted by environment.
    """
    edge = torch.zeros_like(valid[:1])
    before = torch.cat([edge, valid[:-1]])
    after = torch.cat([valid[1:], edge])
    return _pieces(valid & ~before, valid & ~after)


def episode_pieces(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pieces of episodes in a rollout, including the final observation of each.

    Args:
        valid: bool ``[T, N]`` on the CPU, see ``Rollout.valid``.

    Returns:
        first step, environment and length of each piece, int64 ``[M]``, sorted by environment. The
        steps are counted from 0 to T, where T is the state after the rollout's last step.
    """
    edge = torch.ones_like(valid[:1])
    return _pieces(torch.cat([edge, ~valid]), torch.cat([~valid, edge]))


def _pieces(begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First step, environment and length of the pieces between ``begins`` and ``ends [T, N]``."""
    environment, first = begins.T.nonzero(as_tuple=True)
    last = ends.T.nonzero(as_tuple=True)[1]
    return first, environment, last - first + 1


def padded(first: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Places of pieces that are padded to the longest, L; padding repeats the first step.

    Args:
        first, lengths: int64 ``[M]``.

    Returns:
        the step of each place, int64 ``[L, M]``, and whether it is inside its piece, bool.
    """
    steps = torch.arange(int(lengths.max()))[:, None]
    inside = steps < lengths
    return torch.where(inside, first + steps, first), inside


def even_split(order: list[int], counts: list[int], lengths: list[int], parts: int) -> list[Tensor]:
    """Minibatches of sequences with nearly equal numbers of steps, int64 ``[m]`` each.

    The longest sequences come first, in ``order`` among those of nearly equal length, each to the
    minibatch with the fewest steps. Those from which the critic alone learns follow.

    Args:
        order: a permutation of the sequences.
        counts, lengths: steps of each sequence from which the policy learns, and all of them.
        parts: most minibatches.
    """
    parts = min(parts, sum(count > 0 for count in counts))
    minibatches: list[list[int]] = [[] for _ in range(parts)]
    for alone in (False, True):
        indices = [i for i in order if (counts[i] == 0) == alone]
        loads = [0] * parts
        for i in sorted(indices, key=lambda i: -lengths[i].bit_length()):
            lightest = loads.index(min(loads))
            minibatches[lightest].append(i)
            loads[lightest] += lengths[i]
    return [torch.tensor(minibatch) for minibatch in minibatches]


def split_sequences(
    rollout: Rollout[ObservationT],
    observation: ObservationT,
    old_log_prob: Tensor,
    advantages: Tensor,
    targets: Tensor,
) -> Sequences[ObservationT]:
    """Split a rollout into sequences.

    If every environment's steps are one whole episode, that is its sequence. If episodes begin and
    end within the rollout, each piece of an episode becomes one sequence, padded to the
    longest. A piece that begins at step 0 starts from the rollout's recurrent state, the others
    from zeros. Without a recurrent state each step is a sequence. From final observations of
    truncated episodes, and from the windows before them, the critic alone learns.

    Args:
        rollout: the rollout.
        observation: its normalised observations.
        old_log_prob: log-probability of the actions, relative to which the loss takes importance
            ratios, ``[T, N]``.
        advantages, targets: ``[T, N]``, normalised.
    """
    if rollout.valid is None:
        return Sequences(
            observation, rollout.actions, old_log_prob, advantages, targets, rollout.hidden
        )
    device, cut_offs = rollout.actions.device, rollout.cut_offs
    weight, critic_weight = None, None
    if not rollout.hidden:
        positions, environment = (x[None] for x in rollout.valid.nonzero(as_tuple=True))
        first, lengths, counts = positions[0], None, None
    else:
        first, environment, counts = segments(rollout.valid)
        lengths = counts
        if cut_offs is not None:
            after = torch.cat([cut_offs.final, torch.zeros_like(cut_offs.final[:1])])
            lengths = counts + after[first + counts, environment].long()
            windows = cut_offs.lengths > 0
            first = torch.cat([first, cut_offs.first[windows]])
            environment = torch.cat([environment, cut_offs.environment[windows]])
            lengths = torch.cat([lengths, cut_offs.lengths[windows]])
            counts = torch.cat([counts, torch.zeros_like(cut_offs.lengths[windows])])
        positions, inside = padded(first, lengths)
        learns = torch.arange(len(positions))[:, None] < counts
        weight, critic_weight = (moved(x, device).to(advantages.dtype) for x in (learns, inside))
    time, environment = moved(positions, device), moved(environment, device)
    continues = moved(first == 0, device)[:, None]

    def part(x: Tensor) -> Tensor:
        return x[time, environment]

    tensors = {name: part(x) for name, x in observation.tensors().items()}
    return Sequences(
        type(observation).from_tensors(tensors),
        part(rollout.actions),
        part(old_log_prob),
        part(advantages),
        part(targets),
        tuple(torch.where(continues, h[:, environment], 0.0) for h in rollout.hidden),
        weight,
        lengths,
        critic_weight,
        counts,
    )
