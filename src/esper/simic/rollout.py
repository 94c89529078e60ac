"""The rollout buffer: T steps of N environments, ``[T, N, ...]``."""

from typing import Any, Generic

import torch
from torch import Tensor

from esper.tamiyo.policy.interface import ObservationT, RecurrentState, named_inputs


class Rollout(Generic[ObservationT]):
    """T steps of each of N environments, preallocated and written in place.

    Attributes:
        observation: what was seen before each action, raw, leading axes ``[T, N]``.
        actions: int64 ``[T, N, heads]``.
        log_prob: of the actions when they were taken, ``[T, N]``.
        values: the critic's, normalised, ``[T, N]``.
        rewards: ``[T, N]``.
        terminated: whether the episode ended with this step, bool ``[T, N]``.
        truncated: whether it was cut off there, so that its return is estimated, bool ``[T, N]``.
        last_value: the critic's opinion of the state after the last step, normalised, ``[N]``.
        hidden: of the memory before the first step; empty stands for the start of an episode.
        valid: bool ``[T, N]`` on the CPU, false where a step only reset an environment; None where
            every environment's steps are one whole episode.
    """

    def __init__(self, length: int, first: ObservationT, actions: Tensor):
        def space(like: Tensor) -> Tensor:
            return torch.zeros(length, *like.shape, dtype=like.dtype, device=like.device)

        seen = first.tensors()
        self.observation: ObservationT = type(first).from_tensors(
            {n: space(x) for n, x in seen.items()}
        )
        number = torch.zeros(len(actions), device=actions.device)
        self.actions = space(actions)
        self.log_prob = space(number)
        self.values = space(number)
        self.rewards = space(number)
        self.terminated = space(number.bool())
        self.truncated = space(number.bool())
        self.last_value = number
        self.hidden: RecurrentState = ()
        self.valid: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The floating-point tensors by name."""
        named = named_inputs(self.observation, self.hidden) | {
            "reward": self.rewards,
            "log_prob": self.log_prob,
            "value": self.values,
            "last_value": self.last_value,
        }
        return {name: x for name, x in named.items() if x.is_floating_point()}

    def state(self) -> dict[str, Any]:
        """Everything in it, for a file."""
        names = ("actions", "log_prob", "values", "rewards", "terminated", "truncated")
        own = {name: getattr(self, name) for name in (*names, "last_value", "hidden", "valid")}
        return {"observation": self.observation.tensors(), **own}

    @classmethod
    def from_state(cls, kind: type[ObservationT], state: dict[str, Any]) -> "Rollout[ObservationT]":
        """The inverse of ``state``; ``kind`` is that of the observations."""
        rollout = cls.__new__(cls)
        rollout.observation = kind.from_tensors(state["observation"])
        for name, value in state.items():
            if name != "observation":
                setattr(rollout, name, value)
        return rollout

    def write(
        self, t: int, observation: ObservationT, actions: Tensor, log_prob: Tensor, value: Tensor
    ) -> None:
        """What was seen and done at step ``t``."""
        mine = self.observation.tensors()
        for name, tensor in observation.tensors().items():
            mine[name][t] = tensor
        self.actions[t] = actions
        self.log_prob[t] = log_prob
        self.values[t] = value

    def outcome(self, t: int, reward: Tensor, done: bool) -> None:
        """What came of step ``t``. The last step of an episode is terminated, not truncated."""
        self.rewards[t] = reward.to(self.rewards.dtype)
        self.terminated[t] = done
