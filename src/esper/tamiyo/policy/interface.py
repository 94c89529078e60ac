"""What the learner asks of a policy, whatever it sees and does."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

RecurrentState = tuple[Tensor, ...]
"""What is carried from step to step, each ``[layers, N, width]``; empty without memory."""


class TensorRecord(Protocol):
    """An observation: named tensors with the same leading axes."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        ...

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """The inverse of ``tensors``."""
        ...


ObservationT = TypeVar("ObservationT", bound=TensorRecord)


def named_inputs(observation: TensorRecord, hidden: RecurrentState) -> dict[str, Tensor]:
    """What a policy computes with, by name: ``observation/NAME`` and ``hidden/I``."""
    seen = {f"observation/{name}": x for name, x in observation.tensors().items()}
    return seen | named_hidden(hidden)


def inputs_from(
    kind: type[ObservationT], tensors: dict[str, Tensor]
) -> tuple[ObservationT, RecurrentState]:
    """The inverse of ``named_inputs``; other names are passed over, ``kind`` is of observations."""
    prefix = "observation/"
    seen = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
    return kind.from_tensors(seen), hidden_from(tensors)


def named_hidden(hidden: RecurrentState) -> dict[str, Tensor]:
    """What is carried, by name: ``hidden/I``."""
    return {f"hidden/{i}": state for i, state in enumerate(hidden)}


def hidden_from(tensors: dict[str, Tensor]) -> RecurrentState:
    """The inverse of ``named_hidden``; other names are passed over."""
    return tuple(x for name, x in tensors.items() if name.startswith("hidden/"))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the policy says about actions that were taken; leading axes ``[T, N]``.

    Attributes:
        log_prob: of the whole action, the sum over the heads that matter, ``[T, N]``.
        head_entropy: nats, 0 where a head does not matter, ``[T, N, heads]``.
        head_choice: whether a head mattered and had more than one option, bool ``[T, N, heads]``.
        value: normalised value of the state, ``[T, N]``.
    """

    log_prob: Tensor
    head_entropy: Tensor
    head_choice: Tensor
    value: Tensor


class Policy(nn.Module, ABC, Generic[ObservationT]):
    """A recurrent actor and critic: an encoder, a memory, and heads on top of it.

    The trunk (encoder and memory) computes in ``amp_dtype`` where one is set, when acting and when
    learning alike: half precision on one side alone would bias every importance ratio. Heads,
    log-probs and values are float32 whatever autocast region the caller is in.

    Attributes:
        heads: names of the action heads, in the order of the last axis of the actions.
        amp_dtype: dtype of the trunk's autocast region; None is full precision.
    """

    heads: tuple[str, ...]
    amp_dtype: torch.dtype | None = None

    @abstractmethod
    def initial_hidden(self, environments: int) -> RecurrentState:
        """Zeros for the start of an episode."""

    @abstractmethod
    def head_parameters(self, head: str) -> list[nn.Parameter]:
        """Parameters that belong to one head alone; ``value`` is the critic's."""

    def value_layer(self) -> nn.Linear | None:
        """The linear map whose output is the normalised value, where it follows the moments of the
        returns; None where it need not, for returns stay much the same."""
        return None

    @abstractmethod
    def noise_shape(self, observation: ObservationT) -> tuple[int, int]:
        """Heads, and options of the widest: how many uniform numbers ``act`` wants each row."""

    @abstractmethod
    def encode(self, observation: ObservationT) -> tuple[Tensor, ...]:
        """Input of the memory ``[..., width]``, and what else the heads need of the observation."""

    @abstractmethod
    def remember(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Output of the memory ``[T, N, width]`` for whole sequences, and the state after them."""

    @abstractmethod
    def evaluate_heads(
        self,
        memory: Tensor,
        encoded: tuple[Tensor, ...],
        observation: ObservationT,
        actions: Tensor,
    ) -> Evaluation:
        """Log-probs, entropies and values given the memory's output and ``encode``'s."""

    @abstractmethod
    def act(
        self, observation: ObservationT, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        """Choose one action for each environment.

        Args:
            observation: leading axis ``[N]``.
            hidden: of the memory before this step.
            noise: uniform numbers, ``[N, heads, at least the widest head]``; None takes the mode.

        Returns:
            actions int64 ``[N, heads]``, log-prob ``[N]``, normalised value ``[N]``, hidden after.
        """

    @contextmanager
    def frozen_weights(self) -> Iterator[None]:
        """A region in which no weight changes: ``act`` may keep there what it makes of them."""
        yield

    def evaluate_actions(
        self, observation: ObservationT, actions: Tensor, hidden: RecurrentState
    ) -> Evaluation:
        """Log-probs, entropies and values of whole sequences in one call of the memory.

        Args:
            observation: leading axes ``[T, N]``.
            actions: int64 ``[T, N, heads]``.
            hidden: before the first step.
        """
        encoded = self.encode(observation)
        memory, _ = self.remember(encoded[0], hidden)
        return self.evaluate_heads(memory, encoded, observation, actions)

    def trunk_precision(self, device: torch.device) -> torch.autocast:
        """The region of encoder and memory.

        Casts are not cached: one made while acting, without gradients, would sever the next
        backward pass through the weights.
        """
        return torch.autocast(
            device.type,
            dtype=self.amp_dtype or torch.bfloat16,
            enabled=self.amp_dtype is not None,
            cache_enabled=False,
        )


def full_precision(device: torch.device) -> torch.autocast:
    """A region in which nothing is cast, whatever surrounds it."""
    return torch.autocast(device.type, enabled=False)


def upcast(x: Tensor) -> Tensor:
    """``x`` in float32 where it was computed in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
