"""The rollout buffer: T steps of N environments, ``[T, N, ...]``."""

from typing import Any, Generic

import torch
from torch import Tensor

from esper.tamiyo.policy.interface import ObservationT, RecurrentState, named_inputs


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
