"""A recurrent policy over flat features: an encoder, a memory, heads side by side.

The policy for tasks that are not networks in training. Its heads are drawn independently of one
another given what is remembered.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.action_masks import MaskedCategorical
from esper.tamiyo.policy.base import Evaluation, Hidden, Policy, full_precision, upcast


@dataclass(frozen=True, slots=True)
class FlatObservation:
    """What a policy sees of a task; leading axes ``[...]`` are ``[N]`` or ``[T, N]``.

    Attributes:
        features: ``[..., inputs]``.
        masks: options that are legal, bool ``[..., heads, widest]``; false past a head's options.
    """

    features: Tensor
    masks: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """See ``TensorRecord.tensors``."""
        return {"features": self.features, "masks": self.masks}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """See ``TensorRecord.from_tensors``."""
        return cls(**tensors)


class RecurrentPolicy(Policy[FlatObservation]):
    """Actor and critic with one trunk.

    Args:
        inputs: features of an observation.
        options: of each head.
        memory: width of the LSTM, 0 for none: then the policy sees the present alone.
        encoder: width of the encoder.
        head: hidden units of the actor's and of the critic's head.
    """

    def __init__(
        self,
        inputs: int,
        options: tuple[int, ...],
        memory: int = 64,
        encoder: int = 64,
        head: int = 64,
    ):
        super().__init__()
        single = len(options) == 1
        self.heads = ("action",) if single else tuple(f"action_{i}" for i in range(len(options)))
        self.memory_width = memory
        self.encoder = nn.Sequential(nn.Linear(inputs, encoder), nn.Tanh())
        self.lstm = nn.LSTM(encoder, memory) if memory else None
        width = memory or encoder
        self.actor = nn.Sequential(nn.Linear(width, head), nn.Tanh())
        self.action_heads = nn.ModuleList(nn.Linear(head, count) for count in options)
        self.value_head = nn.Sequential(nn.Linear(width, head), nn.Tanh(), nn.Linear(head, 1))
        self.register_buffer("places", torch.tensor(places(options)), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Orthogonal, biases 0, the policy nearly uniform (Huang et al., "The 37 implementation
        details of proximal policy optimization", 2022)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.orthogonal_(parameter, 1.0 if "lstm" in name else 2**0.5)
            else:
                nn.init.zeros_(parameter)
        with torch.no_grad():
            for layer in self._action_layers():
                layer.weight.mul_(0.01 / 2**0.5)
            last = self.value_head[-1]
            last.get_parameter("weight").div_(2**0.5)
            if self.lstm is not None:
                forget_gate = slice(self.memory_width, 2 * self.memory_width)
                self.lstm.get_parameter("bias_ih_l0")[forget_gate] = 1.0

    def _action_layers(self) -> list[nn.Linear]:
        return [layer for layer in self.action_heads if isinstance(layer, nn.Linear)]

    def initial_hidden(self, environments: int) -> Hidden:
        """See ``Policy.initial_hidden``."""
        if self.lstm is None:
            return ()
        zeros = next(self.parameters()).new_zeros(1, environments, self.memory_width)
        return zeros, zeros.clone()

    def head_parameters(self, head: str) -> list[nn.Parameter]:
        """See ``Policy.head_parameters``."""
        if head == "value":
            return list(self.value_head.parameters())
        return list(self.action_heads[self.heads.index(head)].parameters())

    def noise_shape(self, observation: FlatObservation) -> tuple[int, int]:
        """See ``Policy.noise_shape``."""
        heads, widest = observation.masks.shape[-2:]
        return heads, widest

    def encode(self, observation: FlatObservation) -> tuple[Tensor, ...]:
        """Input of the memory ``[..., encoder]``."""
        with self.trunk_precision(observation.features.device):
            return (self.encoder(observation.features),)

    def remember(self, features: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """See ``Policy.remember``."""
        if self.lstm is None:
            return upcast(features), ()
        with self.trunk_precision(features.device):
            memory, (h, c) = self.lstm(features, hidden)
        return upcast(memory), (upcast(h), upcast(c))

    def judge(
        self,
        memory: Tensor,
        encoded: tuple[Tensor, ...],
        observation: FlatObservation,
        actions: Tensor,
    ) -> Evaluation:
        """See ``Policy.judge``; one padded log-softmax for all heads."""
        with full_precision(memory.device):
            distribution = self._distribution(memory, observation)
            log_prob = distribution.log_prob(actions).sum(-1)
            choice = observation.masks.sum(-1) > 1
            return Evaluation(log_prob, distribution.entropy(), choice, self._value(memory))

    @torch.no_grad()
    def act(
        self, observation: FlatObservation, hidden: Hidden, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Hidden]:
        """See ``Policy.act``."""
        (features,) = self.encode(observation)
        memory, hidden = self.remember(features[None], hidden)
        memory = memory[0]
        with full_precision(memory.device):
            distribution = self._distribution(memory, observation)
            actions = distribution.mode if noise is None else distribution.sample(noise)
            log_prob = distribution.log_prob(actions).sum(-1)
            return actions, log_prob, self._value(memory), hidden

    def _distribution(self, memory: Tensor, observation: FlatObservation) -> MaskedCategorical:
        """Over the options of every head ``[..., heads, widest]``; the linear maps are one."""
        layers = self._action_layers()
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers])
        logits = nn.functional.linear(self.actor(memory), weight, bias)
        return MaskedCategorical(
            logits[..., self.get_buffer("places")], observation.masks, validate=False
        )

    def _value(self, memory: Tensor) -> Tensor:
        return self.value_head(memory)[..., 0].float()


def places(options: tuple[int, ...]) -> list[list[int]]:
    """Where each option of each head stands in the row of all heads; 0, masked, where none is."""
    begins = [sum(options[:i]) for i in range(len(options))]
    widest = range(max(options))
    return [
        [begin + i if i < count else 0 for i in widest]
        for begin, count in zip(begins, options, strict=True)
    ]
