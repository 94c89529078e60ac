"""N Gymnasium environments in lockstep, as acting sees them, in whatever process they run."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from esper.leyline.errors import UsageError
from esper.simic.gym.action_spaces import Actions, Bools, Choices
from esper.tamiyo.policy.recurrent import FlatObservation

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a policy's inputs and outputs.

    Attributes:
        inputs: number of features of an observation.
        options: number of options of each head.
        measured: whether some features are quantities, which are normalised.
        raw: first column of other features and the one after their last, in pairs.
        components: number of components of Box actions.
        space: the observation space; None where it is not known.
    """

    inputs: int
    options: tuple[int, ...]
    measured: bool
    raw: tuple[tuple[int, int], ...] = ()
    components: int = 0
    space: spaces.Space[Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that ended.

    Attributes:
        environment: identity of its environment.
        episode_return: sum of its rewards, unnormalised.
        length: number of steps.
        terminated: whether the episode reached a terminal state rather than being truncated.
    """

    environment: int
    episode_return: float
    length: int
    terminated: bool


class Environments(ABC):
    """N environments of one task with their current observations.

    Args:
        shape, actions: see the attributes.
        count: number of environments N.
        seed: seed of the run.
        first: identity of the first environment; those of the others follow.
        limit: steps after which an episode is truncated.

    Attributes:
        shape: sizes of a policy that acts in them.
        actions: conversion of choices to actions.
        identities: identities of the environments, int64 ``[N]``.
        observation: the current observations; overwritten by the next step.
        reward: rewards of the last step, float64 ``[N]``.
        terminated, truncated: whether the last step ended the episode, bool ``[N]``.
        over: environments whose episode has ended, bool ``[N]``: ``observation`` is their final
            one, and the next step only resets them.
        ended: episodes that ended in the last step.
        returns: rewards of each current episode so far, float64 ``[N]``.
        lengths: steps of each current episode so far, int64 ``[N]``.
    """

    def __init__(
        self, shape: Shape, actions: Actions, count: int, seed: int, first: int, limit: int
    ):
        self.shape, self.actions, self.seed, self.limit = shape, actions, seed, limit
        self.count = count
        self.identities = torch.arange(first, first + count)
        options = shape.options
        self._features: NDArray[np.float32] = np.zeros((count, shape.inputs), dtype=np.float32)
        self._masks: Bools = np.zeros(
            (count, len(options), max(options, default=1)), dtype=np.bool_
        )
        self.observation = FlatObservation(
            torch.from_numpy(self._features), torch.from_numpy(self._masks)
        )
        self.reward, self.returns = np.zeros((2, count))
        self.lengths = np.zeros(count, np.int64)
        self.terminated, self.truncated, self.over = np.zeros((3, count), dtype=np.bool_)
        self.ended: list[Episode] = []

    def _begin_all(self) -> None:
        """Note that every environment begins an episode."""
        for x in (self.reward, self.returns, self.lengths):
            x.fill(0)
        for flags in (self.terminated, self.truncated, self.over):
            flags.fill(False)
        self.ended = []

    def _note(self, reward: Floats, terminated: Bools, truncated: Bools) -> None:
        """Note a step of all environments, of which those that were ``over`` began an episode."""
        going = ~self.over
        self.returns = np.where(going, self.returns + reward, 0.0)
        self.lengths = np.where(going, self.lengths + 1, 0)
        self.reward, self.terminated, self.truncated = reward, terminated, truncated
        self.over = terminated | truncated
        ends = np.flatnonzero(self.over & going)
        self.ended = [
            Episode(
                int(self.identities[i]),
                float(self.returns[i]),
                int(self.lengths[i]),
                bool(terminated[i]),
            )
            for i in ends
        ]

    def _compare(self, i: int, state: dict[str, torch.Tensor]) -> None:
        """Refuse an environment that does not observe what ``state`` says, bit for bit."""
        equal = self._features[i].tobytes() == state["features"][i].numpy().tobytes()
        if not (equal and np.array_equal(self._masks[i], state["masks"][i].numpy())):
            raise mismatch(i)

    @abstractmethod
    def reset(self) -> None:
        """Begin the first episode of every environment."""

    @abstractmethod
    def step(self, choices: Choices) -> None:
        """Take one step in every environment; those that are ``over`` are reset instead.

        Args:
            choices: see ``Choices``.

        Raises:
            UsageError: an environment failed, or returned what it should not.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """What ``load`` needs, for the checkpoint: seeds and actions, as no pickle is needed."""

    @abstractmethod
    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restore ``state`` by repeating its actions.

        Raises:
            ValueError: the number of environments or of features differs.
            UsageError: an environment's observation differs from the saved one.
        """


def mismatch(i: int) -> UsageError:
    """The error where repeating an environment's actions does not lead to what it observed."""
    return UsageError(
        f"resume: environment {i} did not reproduce its saved observation, because seed and "
        "actions do not determine the episodes of this task; start a new run"
    )
