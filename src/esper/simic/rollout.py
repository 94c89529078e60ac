"""The rollout buffer: T steps of N environments, ``[T, N, ...]``, and its sequences.

Sequences are padded so that the LSTM runs over all of them in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """

    lag: float | None = None

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
    """

    observation: ObservationT
    actions: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    targets: Tensor
    hidden: RecurrentState
    weight: Tensor | None = None
    lengths: Tensor | None = None

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
        return self._selection(index, lambda x: x[:length].index_select(1, index), lengths)

    def pick_padded(self, indices: Tensor) -> "Sequences[ObservationT]":
        """``pick``, padded so that few shapes occur, which CUDA graphs need.

        If sequences differ in length, the length and the number of the chosen ones are rounded up
        to powers of two, with steps of weight 0.
        """
        if self.lengths is None or self.weight is None:
            return self.pick(indices)
        length, count = int(self.lengths[indices].max()), len(indices)
        steps, columns = torch.arange(_power_of_two(length)), torch.arange(_power_of_two(count))
        inside = (steps < length)[:, None] & (columns < count)
        device = self.actions.device
        positions = moved(steps.clamp(max=length - 1), device)
        index = moved(torch.cat([indices, indices[:1].expand(len(columns) - count)]), device)

        selection = self._selection(
            index, lambda x: x.index_select(1, index).index_select(0, positions)
        )
        assert selection.weight is not None
        return replace(selection, weight=selection.weight * moved(inside, device))

    def _selection(
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
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that an update computes with, by name."""
        tensors = named_inputs(self.observation, self.hidden) | {
            "actions": self.actions,
            "log_prob": self.old_log_prob,
            "advantage": self.advantages,
            "target": self.targets,
        }
        return tensors if self.weight is None else tensors | {"weight": self.weight}

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
        )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


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
    from zeros.

    Args:
        rollout: the rollout.
        observation: its normalised observations.
        old_log_prob: log-probability of the actions, relative to which the loss takes importance
            ratios, ``[T, N]``.
        advantages, targets: ``[T, N]``, normalised.
    """
    if rollout.valid is None:
        return Sequences(
            observation,
            rollout.actions,
            old_log_prob,
            advantages,
            targets,
            rollout.hidden,
        )
    first, environment, lengths = segments(rollout.valid)
    positions, inside = padded(first, lengths)
    device = rollout.actions.device
    time = moved(positions, device)
    environment = moved(environment, device)
    weight = moved(inside, device)
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
        weight.to(advantages.dtype),
        lengths,
    )
