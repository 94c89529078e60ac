"""The interface between the learner and a policy, for any observations and actions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.features import FeatureNames
from esper.tamiyo.policy.layers import PackingLayer

RecurrentState = tuple[Tensor, ...]
"""State carried from step to step, each tensor ``[layers, N, width]``; empty without memory."""


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
    """The inputs of a policy by name: ``observation/NAME`` and ``hidden/I``."""
    tensors = {f"observation/{name}": x for name, x in observation.tensors().items()}
    return tensors | named_hidden(hidden)


def inputs_from(
    kind: type[ObservationT], tensors: dict[str, Tensor]
) -> tuple[ObservationT, RecurrentState]:
    """The inverse of ``named_inputs``; ignores other names. ``kind`` is the observation class."""
    prefix = "observation/"
    observation_tensors = {
        n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)
    }
    return kind.from_tensors(observation_tensors), hidden_from(tensors)


def named_hidden(hidden: RecurrentState) -> dict[str, Tensor]:
    """The recurrent state by name: ``hidden/I``."""
    return {f"hidden/{i}": state for i, state in enumerate(hidden)}


def hidden_from(tensors: dict[str, Tensor]) -> RecurrentState:
    """The inverse of ``named_hidden``; ignores other names."""
    return tuple(x for name, x in tensors.items() if name.startswith("hidden/"))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The policy's evaluation of given actions; leading axes ``[T, N]``.

    Attributes:
        log_prob: log-prob of the action, summed over its relevant heads, ``[T, N]``.
        head_entropy: nats, 0 where a head is irrelevant, ``[T, N, heads]``.
        head_choice: whether a head was relevant with more than one legal option, bool
            ``[T, N, heads]``.
        value: normalised value of the state, ``[T, N]``.
    """

    log_prob: Tensor
    head_entropy: Tensor
    head_choice: Tensor
    value: Tensor


class Policy(nn.Module, ABC, Generic[ObservationT]):
    """A recurrent actor and critic: an encoder, a memory, and heads on top.

    The trunk (encoder and memory) computes in ``amp_dtype`` if set, both when acting and when
    learning: half precision in only one of them would bias every importance ratio. Heads, log-probs
    and values are float32, even inside an autocast region of the caller.

    Attributes:
        heads: names of the action heads, in the order of the last axis of the actions.
        amp_dtype: dtype of the trunk's autocast region; None is full precision.
        features: names of the features of a growth observation; None for other observations.
    """

    heads: tuple[str, ...]
    amp_dtype: torch.dtype | None = None
    features: FeatureNames | None = None

    @property
    def amp_dtype_name(self) -> str | None:
        """``bfloat16`` or ``float16``, None for full precision."""
        return None if self.amp_dtype is None else str(self.amp_dtype).removeprefix("torch.")

    @abstractmethod
    def initial_hidden(self, environments: int) -> RecurrentState:
        """Zeros for the start of an episode."""

    @abstractmethod
    def head_parameters(self, head: str) -> list[nn.Parameter]:
        """Parameters used only by ``head``; the head ``value`` is the critic."""

    def value_layer(self) -> nn.Linear | None:
        """The linear layer of the normalised value, rescaled when the returns' moments change.

        None if no layer is to be rescaled, for tasks whose returns change little.
        """
        return None

    @abstractmethod
    def noise_shape(self, observation: ObservationT) -> tuple[int, int]:
        """Shape of ``act``'s noise per environment: number of heads, options of the widest head."""

    @abstractmethod
    def encode(self, observation: ObservationT) -> tuple[Tensor, ...]:
        """Input of the memory ``[..., width]``, followed by other tensors that the heads need."""

    @abstractmethod
    def run_lstm(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """The memory's outputs for whole sequences.

        Args:
            features: what ``encode`` returned first, ``[T, N, width]``.
            hidden: recurrent state before the first step.

        Returns:
            outputs ``[T, N, memory width]``, and the state after the last step.
        """

    @abstractmethod
    def evaluate_heads(
        self,
        memory: Tensor,
        encoding: tuple[Tensor, ...],
        observation: ObservationT,
        actions: Tensor,
    ) -> Evaluation:
        """Log-probs, entropies and values of given actions.

        Args:
            memory: outputs of ``run_lstm``, ``[T, N, memory width]``.
            encoding: what ``encode`` returned for the observation.
            observation: leading axes ``[T, N]``.
            actions: int64 ``[T, N, heads]``.
        """

    @abstractmethod
    def act(
        self, observation: ObservationT, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        """Choose one action for each environment.

        Args:
            observation: leading axis ``[N]``.
            hidden: recurrent state before this step.
            noise: uniform numbers, ``[N, heads, at least the widest head]``; None: take the mode.

        Returns:
            actions int64 ``[N, heads]``, log-prob ``[N]``, normalised value ``[N]``, hidden after.
        """

    @contextmanager
    def frozen_weights(self) -> Iterator[None]:
        """A context in which no weight changes, so that layers may cache derived weights.

        Only on a CPU: a captured CUDA graph would read the cached weights even after an update.
        """
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters())
        layers = [layer for layer in self.modules() if isinstance(layer, PackingLayer) and on_cpu]
        for layer in layers:
            layer.pack()
        try:
            yield
        finally:
            for layer in layers:
                layer.unpack()

    def evaluate_actions(
        self, observation: ObservationT, actions: Tensor, hidden: RecurrentState
    ) -> Evaluation:
        """Log-probs, entropies and values of whole sequences, with one call of the memory.

        Args:
            observation: leading axes ``[T, N]``.
            actions: int64 ``[T, N, heads]``.
            hidden: recurrent state before the first step.
        """
        encoding = self.encode(observation)
        memory, _ = self.run_lstm(encoding[0], hidden)
        return self.evaluate_heads(memory, encoding, observation, actions)

    def trunk_precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """The autocast context of encoder and memory.

        Its cast cache is off: a cached cast made while acting, without gradients, would
        detach the weights from the next backward pass.
        """
        if self.amp_dtype is None:
            return full_precision(device)
        return torch.autocast(device.type, dtype=self.amp_dtype, cache_enabled=False)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, even inside an autocast region."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def upcast(x: Tensor) -> Tensor:
    """``x`` converted to float32 if it is in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
